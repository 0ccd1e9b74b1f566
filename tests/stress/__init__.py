"""make stress: random calls of every operator of csrc/ops.toml, on every runtime, against the float64 reference; changed files;
and processes that call in unusual ways."""
