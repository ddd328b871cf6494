"""Triton's interpreter at a third of the time, to the same bits.

It replaces `tl`'s functions by its own when a kernel starts, and once more for every helper that the kernel calls,
which finds them replaced already. It works out for each sum of integers whether it overflows, and then, unless
debugging, looks at nothing. And for every number that a kernel makes it describes the type anew, shape and all. Here
functions are replaced once, overflow is not looked for, and each type is described once. Before every sum it asks some
forty questions about which type it is computed in, which two operands of one type answer by themselves.
"""

from dataclasses import replace


class _Nothing:
    def restore(self) -> None:
        pass


def hurry() -> None:
    """From now on, in this process; nothing where Triton is another one than this is written for."""
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    _replace_once(interpreter, language)
    _describe_once(interpreter, language.core)
    _broadcast_what_differs(language.semantic.TritonSemantic)
    _promote_what_differs(language.semantic.TritonSemantic, language.core.tensor)
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _replace_once(interpreter, language) -> None:
    original, replaced = interpreter._patch_lang, []

    def patch(function):
        # A helper of Triton's own sees `triton.language.core`, a kernel `triton.language`: two names, replaced apart.
        seen = [x for x in function.__globals__.values() if x is language or x is language.core]
        if replaced and all(any(x is y for y in replaced) for x in seen):
            return _Nothing()
        scope, is_kernel = original(function), not replaced
        replaced.extend(seen)
        if is_kernel:
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    interpreter._patch_lang = patch


def _describe_once(interpreter, core) -> None:
    """One block type for each shape of each element, which remembers what its tensors are beside their numbers."""
    block_type, tensor, types = core.block_type, core.tensor, {}
    describe, make, numpys = block_type.__init__, tensor.__init__, interpreter._get_np_dtype

    def new(cls, element_ty, shape):
        key = element_ty.name, getattr(element_ty, "address_space", None), *shape
        if key not in types:
            made = object.__new__(cls)
            describe(made, element_ty, shape)  # which may refuse the shape
            types[key] = made
        return types[key]

    def init(self, handle, type):
        known = type.__dict__.get("_of_tensors")
        if known is None:
            make(self, handle, type)
            type._of_tensors = {name: x for name, x in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(known, handle=handle)

    def in_numpy(type):
        known = type.__dict__.get("_in_numpy")
        if known is None:
            known = type._in_numpy = numpys(type)
        return known

    block_type.__new__, block_type.__init__, tensor.__init__ = new, lambda self, *_: None, init
    interpreter._get_np_dtype = in_numpy


def _broadcast_what_differs(semantic) -> None:
    """Two blocks of one shape, which most pairs are, are left as they are without a look at each of their sides."""
    broadcast = semantic.broadcast_impl_value

    def quickly(self, lhs, rhs):
        x, y = lhs.type, rhs.type
        same = x.is_block() and y.is_block() and list(x.shape) == list(y.shape)
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = quickly


ALIKE = ("fp64", "fp32", "fp16", "int64", "int32", "int1")
"""Types that two operands of one type stay in, float16 but for a division."""
NUMBERS = {"fp64": (int, float), "fp32": (int, float), "int64": (int,), "int32": (int,)}
"""Python's numbers that become what the tensor is that they meet; integers, of 32 bits."""


def _promote_what_differs(semantic, tensor) -> None:
    """Operands of one type, and numbers beside a tensor that they become like, need no common type to be found."""
    promote = semantic.binary_op_type_checking_impl

    def quickly(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        x = lhs.type.scalar.name if isinstance(lhs, tensor) else None
        y = rhs.type.scalar.name if isinstance(rhs, tensor) else None
        if arithmetic_check:
            if x is None and _becomes_like(lhs, y):
                lhs, x = self.scalar_constant(lhs, dtype=rhs.type.scalar), y
            elif y is None and _becomes_like(rhs, x):
                rhs, y = self.scalar_constant(rhs, dtype=lhs.type.scalar), x
            if x == y and x in ALIKE and not (div_or_mod and x == "fp16"):
                return self.broadcast_impl_value(lhs, rhs)
        return promote(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.binary_op_type_checking_impl = quickly


def _becomes_like(number, element: str | None) -> bool:
    kind = type(number)
    return kind in NUMBERS.get(element, ()) and (kind is float or -(2**31) <= number < 2**31)
