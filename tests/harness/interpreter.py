"""Triton's interpreter without work that it does for nothing: most of what it spends on kernels as small as the tests'.

It computes whether integers overflow and then looks at no answer; puts its functions in place of the language's at
every launch and at every call of a function, and back; derives a type's shape again for each value that has it; and
compares the shapes of operands element by element through types of its own. Here each is done once.
Nor does it warn of what a device would compute without a word, of padding.
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as patched

interpreter = cast(Any, patched)  # its private names


@cache
def hurry() -> None:
    """For this process, from now on."""
    assert not interpreter.interpreter_builder.options.debug, "else overflows are looked at"
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    _keep_functions_in_place()
    _remember_types()
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = launched


def _keep_functions_in_place() -> None:
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing = interpreter._LangPatchScope()  # to put back

    def patch_lang(_: Any) -> Any:
        return nothing

    interpreter._patch_lang = patch_lang


def _remember_types() -> None:
    """Types by name: those of one name are equal."""
    np_dtype, make_block, make_tensor = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__
    broadcast = TritonSemantic.broadcast_impl_value
    np_dtypes, blocks, shapes, sizes = dict[str, Any](), dict[Any, Any](), dict[str, Any](), dict[Any, Any]()

    def np_dtype_of(dtype: Any) -> Any:
        if (found := np_dtypes.get(dtype.name)) is None:
            found = np_dtypes[dtype.name] = np_dtype(dtype)
        return found

    def block_made(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if (known := blocks.get(key)) is None:
            make_block(self, element_ty, shape)
            blocks[key] = (self.shape, self.numel, self.name)
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known

    def tensor_made(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 (Triton's name)
        if (known := shapes.get(type.name)) is None:
            make_tensor(self, handle, type)
            one = tuple(size.value for size in self.shape)
            shapes[type.name] = self.shape, self.numel = sizes.setdefault(one, (self.shape, self.numel))
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    interpreter._get_np_dtype = np_dtype_of
    tl.block_type.__init__ = block_made
    tl.tensor.__init__ = tensor_made
    TritonSemantic.broadcast_impl_value = broadcasted
