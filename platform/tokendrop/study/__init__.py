"""Many runs as one experiment: sweeps over the keys of a job."""
