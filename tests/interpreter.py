"""Triton's interpreter at half the time, to the same bits.

It replaces `tl`'s functions by its own when a kernel starts, and once more for every helper that the kernel calls,
which finds them replaced already. And it works out for each sum of integers whether it overflows, and then, unless
debugging, looks at nothing. Here neither is done.
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
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
