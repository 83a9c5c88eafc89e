"""Parts of `millrace bench chaos`: a target run, a fault injector and checks of the result."""
