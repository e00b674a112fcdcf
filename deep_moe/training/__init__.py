"""The differentiable layer. docs/training.md explains it; the call is `deep_moe.moe`, the module
`deep_moe.MoELayer`.

    functional   the call, its checks, and who does it
    layer        the module
    operators    PyTorch's operators: forward, backward, shapes for compilers
    experts      the order of steps and products, of both passes
    rows         tokens, slots, and the rows that experts read
    steps        what happens between products: plain_steps in PyTorch, kernel_steps in our kernels
    products     what PyTorch multiplies
    grouped_product  our own product of quantized rows and weights
    wgrad_accumulation  where a backward pass adds gradients of weights up itself
    frozen       a context in which passes quantize weights once, and kept_weights, what they share
    quantized_activation  the step between two of these, as a call
    quantized    rows and weights as E4M3 with scales
    launching    one kernel, on a GPU or in the emulator
    ways         how tokens get to experts' rows and back, and on one rank
    expert_parallel  the layer over ranks; its rows travel by a process_group of PyTorch's, or by
                     our all_to_all
"""
