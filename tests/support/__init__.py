"""What tests share: cases, models, runs of kernels. Tests import from here, never from each other."""
