"""`millrace dashboard`: a local web page over run directories. Torch-free."""
