"""What `flashtile check`, `bench` and `demo` are made of; `benchmarks/` uses the same cases and timing."""
