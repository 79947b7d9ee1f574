"""What the tests compare with: recorded outputs and tiny checkpoints that another implementation can run."""
