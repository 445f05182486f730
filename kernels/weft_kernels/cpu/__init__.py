"""The CPU kernels: C++ behind a C ABI, built by whatever compiler is there, called through ctypes.

`library.load()` gives a `Library`, or says in `NativeUnavailable` why this machine has none. No torch but in `tensors`.
"""
