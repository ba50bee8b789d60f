"""One folder per engine: each translates that engine's objects for the runtime, nothing else."""
