"""QUADS inside Megatron-Core's own models: quantised expert weights under any model that Megatron builds.

``arguments.py``  flags and what is refused before a process group exists
``experts.py``    which linear layers of a built model are routed experts, and their groups
``cache.py``      DQ(Q(weight)), once per optimizer step, one launch for all local experts of a layer's GEMM
``substitute.py`` the GEMM sees the cached value, the gradient goes to the parameter
``install.py``    all of it, for a model and a QuadsConfig
"""
