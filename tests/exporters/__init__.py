"""Checkpoints that the exporters' own packages write. They are no dependency of the other tests:
`make test-exporters` fetches them."""
