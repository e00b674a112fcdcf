"""A package, so that no installed one of that name takes its place in the processes of ranks."""
