"""What `millrace bench chaos` is made of: a run, a monkey that kills its processes, an audit."""
