"""Make Triton's interpreter five times as fast, with the same results to the bit.

When a kernel starts, the interpreter replaces functions of `tl` by its own, and does so again for every helper that the
kernel calls. It checks each sum of integers for overflow and, unless debugging, ignores the result. For every tile it
builds a new type object, and before every sum it asks some forty questions to find the type of the result.

Here functions are replaced once, overflow is not checked, each type is built once, and operands of one type determine
the result's type at once. Calls of the interpreter's builder, which traces observe, stay the same.
"""

from dataclasses import replace

VERSIONS = "3.6", "3.7"
"""The versions of Triton whose interpreter computes the same with and without these replacements (test_interpreter)."""


class _Nothing:
    def restore(self) -> None:
        pass


def hurry() -> None:
    """Speed up the interpreter of this process; do nothing in a Triton of another version."""
    import triton
    from triton import language
    from triton.runtime import interpreter

    if triton.__version__.rpartition(".")[0] not in VERSIONS:
        return
    _replace_once(interpreter, language)
    _call_directly(interpreter)
    _describe_once(interpreter, language.core)
    _store_directly(interpreter)
    _shape_once(language.semantic.TritonSemantic, language.core)
    _promote_what_differs(language.semantic.TritonSemantic, language.core.tensor)
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _replace_once(interpreter, language) -> None:
    original, replaced, sees = interpreter._patch_lang, set(), {}

    def patch(function):
        # A helper of Triton's own sees `triton.language.core`, a kernel `triton.language`: two names, replaced apart.
        if function not in sees:
            among = function.__globals__.values()
            sees[function] = {x.__name__ for x in among if x is language or x is language.core}
        if replaced and sees[function] <= replaced:
            return _Nothing()
        scope, is_kernel = original(function), not replaced
        replaced.update(sees[function])
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
            block = object.__new__(cls)
            describe(block, element_ty, shape)  # which may refuse the shape
            types[key] = block
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


def _call_directly(interpreter) -> None:
    """A function of `tl` is called without the two around it, of which one only asks what the other has given."""
    semantic, core = interpreter.interpreter_semantic, interpreter.tl.core
    unwrap, constexpr = core._unwrap_if_constexpr, core.constexpr
    plain = {core.tensor, core.dtype, core.block_type, bool, int, float, str, type(None)}

    def unwrapped(x):
        return x if type(x) in plain else x.value if type(x) is constexpr else unwrap(x)

    calls = {}

    def attach(owner, name, member, builder, scope):
        if member not in calls:
            calls[member] = direct(getattr(member, "__wrapped__", member))
        scope.set_attr(owner, name, calls[member])

    def direct(function):
        def call(*args, **options):
            options["_semantic"] = semantic
            return function(*args, **options)

        # A trace takes the first frame that is in none of Triton's files for the kernel's, and its line.
        call.__code__ = call.__code__.replace(co_filename=interpreter.__file__)
        return call

    interpreter._patch_attr, core._unwrap_if_constexpr = attach, unwrapped


def _store_directly(interpreter) -> None:
    """The numbers of a tensor are checked against its type's size, which is worked out once, and filled in at once."""
    numpy, numpys = interpreter.np, interpreter._get_np_dtype
    Handle, Builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    check, pointer = Handle.__post_init__, interpreter.tl.pointer_type

    def most(type):
        known = type.__dict__.get("_bytes")
        if known is None:
            known = type._bytes = 8 if isinstance(type, pointer) else max(1, type.primitive_bitwidth // 8)
        return known

    def init(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > most(dtype):
            check(self)

    def binary_op(self, lhs, rhs, op):
        result, type = op(lhs.data, rhs.data), lhs.dtype.scalar
        return Handle(result.astype(numpys(type)) if result.itemsize > most(type) else result, type)

    def create_splat(self, ret_ty, arg):
        result = numpy.empty(_sides(ret_ty), numpys(arg.dtype))
        result[...] = arg.data
        return Handle(result, arg.dtype.scalar)

    def create_expand_dims(self, arg, axis):
        return Handle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)

    Handle.__init__ = init
    Builder.binary_op, Builder.create_splat, Builder.create_expand_dims = binary_op, create_splat, create_expand_dims


def _sides(type) -> tuple[int, ...]:
    known = type.__dict__.get("_sides")
    if known is None:
        known = type._sides = tuple(type.shape)
    return known


def _shape_once(semantic, core) -> None:
    """What two shapes come to, a block's of other elements, or one with a new axis, is worked out once for each."""
    broadcast, expand, like, equal = (
        semantic.broadcast_impl_value,
        semantic.expand_dims,
        core.block_type.with_element_ty,
        core.dtype.__eq__,
    )
    met = {}

    def both(self, lhs, rhs):
        x, y = lhs.type, rhs.type
        if x is y:
            return lhs, rhs
        if not (x.is_block() and y.is_block()):
            if x.is_block() or y.is_block():
                small, to = (rhs, x.with_element_ty(y.scalar)) if x.is_block() else (lhs, y.with_element_ty(x.scalar))
                filled = self.tensor(self.builder.create_splat(to, small.handle), to)
                return (lhs, filled) if x.is_block() else (filled, rhs)
            return broadcast(self, lhs, rhs)
        if (id(x), id(y)) not in met:
            pair = broadcast(self, lhs, rhs)
            alike = len(_sides(x)) == len(_sides(y))
            met[id(x), id(y)] = (x, y, *(each.type for each in pair)) if alike else None
            return pair
        known = met[id(x), id(y)]
        if known is None:
            return broadcast(self, lhs, rhs)
        return self._stretched(lhs, x, known[2]), self._stretched(rhs, y, known[3])

    def stretched(self, value, type, to):
        return value if type is to else self.tensor(self.builder.create_broadcast(value.handle, _sides(to)), to)

    def expand_dims(self, input, axis):
        if not input.type.is_block():
            return expand(self, input, axis)
        known = input.type.__dict__.setdefault("_expanded", {})
        if axis not in known:
            sides = list(_sides(input.type))
            sides.insert(axis, 1)
            known[axis] = core.block_type(input.type.scalar, sides)
        return self.tensor(self.builder.create_expand_dims(input.handle, axis), known[axis])

    def with_element_ty(self, element):
        if type(element) is not core.dtype:
            return like(self, element)
        known = self.__dict__.setdefault("_like", {})
        if element.name not in known:
            known[element.name] = like(self, element)
        return known[element.name]

    semantic.broadcast_impl_value, semantic._stretched, semantic.expand_dims = both, stretched, expand_dims
    core.block_type.with_element_ty = with_element_ty
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


ALIKE = ("fp64", "fp32", "fp16", "int64", "int32", "int1")
"""Types that two operands of one type stay in, float16 but for a division."""
NUMBERS = {"fp64": (int, float), "fp32": (int, float), "int64": (int,), "int32": (int,)}
"""Python's numbers that become what the tensor is that they meet; integers, of 32 bits."""


def _promote_what_differs(semantic, tensor) -> None:
    """Operands of one type, and numbers beside a tensor that they become like, need no common type to be found."""
    promote = semantic.binary_op_type_checking_impl

    def quickly(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        if type(lhs) is tensor is type(rhs) and lhs.type is rhs.type and lhs.dtype.name in ALIKE and not div_or_mod:
            return lhs, rhs
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
