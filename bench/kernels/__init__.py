"""`lingpt bench`: our kernels against the baselines."""
