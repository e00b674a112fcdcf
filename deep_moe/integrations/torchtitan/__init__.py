"""deep_moe as the routed experts of torchtitan's models, by torchtitan's own overrides:

    --override.imports 'deep_moe.integrations.torchtitan.experts.routed_experts={"recompute": true}'

docs/training.md says what is supported.
"""
