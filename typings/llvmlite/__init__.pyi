# Types for the part of llvmlite that rlx calls; written from its API.
__version__: str
