"""Reading pickles without running anything from them: every class and function in them becomes a stub.

A pickle is a small program: it names classes and functions, and calls them. Here each name gives a class without
behaviour that keeps the state of an object, except for the few names that the caller maps to functions of its own.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

Known = Mapping[str, Any]
"""From full names, such as `torch.Size`, to what stands for them."""

# Python's own reader instead of the one in C, which allocates what a pickle claims. These instructions do so here, or
# look things up outside of the pickle.
_Unpickler: Any = pickle._Unpickler
_REFUSED = (
    *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    *(pickle.INST, pickle.OBJ),
)
MAX_ARGS = 100
"""More than any call in a pickle needs."""


class Stub:
    """What stands for an object of a class that is not loaded: the name of the class, and the object's state."""

    name: ClassVar[str] = ""
    state: Any = None

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, *_: Any) -> Stub:
        """An object that is called, such as a method, gives another stub."""
        return type(self)()

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None:
        """Nothing: what a foreign container holds is not kept."""

    extend = add = append


class _InertUnpickler(_Unpickler):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Any]] = {
        code: step for code, step in _Unpickler.dispatch.items() if code not in {code[0] for code in _REFUSED}
    }

    def __init__(self, data: bytes, known: Known, load_storage: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._known, self._load_storage = known, load_storage
        self.stubs: dict[str, type[Stub]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name: nothing is imported."""
        full = f"{module}.{name}"
        if full in self._known:
            return self._known[full]
        if full not in self.stubs:
            self.stubs[full] = type("Stub", (Stub,), {"name": full})
        return self.stubs[full]

    def persistent_load(self, pid: Any) -> Any:
        """A storage, of a file by `torch.save`."""
        if self._load_storage is None:
            raise ValueError("it refers to objects outside of it")
        return self._load_storage(pid)

    def load_call(self) -> None:
        args, called = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple or len(args) > MAX_ARGS:  # each call copies them
            raise ValueError(f"a call with more than {MAX_ARGS} arguments")
        self.append(called(*args))

    def load_call_with_keywords(self) -> None:
        self.stack.pop()
        self.load_call()

    def load_build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Stub):  # nothing else is changed
            self.stack[-1].state = state

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = load_call
    dispatch[pickle.NEWOBJ_EX[0]] = load_call_with_keywords
    dispatch[pickle.BUILD[0]] = load_build


def load_inert(
    data: bytes, known: Known, load_storage: Callable[[Any], Any] | None = None
) -> tuple[Any, tuple[str, ...]]:
    """The content of a pickle with stubs in place of all objects, and the names of what they stand for.

    `known` are names that stand for something else than a stub; it is called with arguments of the pickle's choice.
    `load_storage` is called with the persistent ids in the pickle.

    Raises:
        ValueError: it is no valid pickle.
    """
    unpickler = _InertUnpickler(data, known, load_storage)
    try:
        return unpickler.load(), tuple(unpickler.stubs)
    except Exception as error:  # the instructions may fail in any way
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ValueError(f"its pickle cannot be read ({reason})") from error
