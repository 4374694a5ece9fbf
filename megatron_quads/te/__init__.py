"""QUADS inside Megatron-Core's own models: quantised expert weights under any model that Megatron builds.

``arguments.py``  flags and what is refused before a process group exists
``experts.py``    which linear layers of a built model are routed experts, and their groups
``cache.py``      DQ(Q(weight)), once per optimizer step, one launch for the local experts of all layers
``scratch.py``    memory that layers share when no copy is kept, and how the backward pass comes by its values
``substitute.py`` the GEMM sees the cached value, the gradient goes to the parameter
``install.py``    all of it, for a model and a QuadsConfig
"""
