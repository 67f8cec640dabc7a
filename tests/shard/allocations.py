"""What torch allocates in a stretch of code."""

from collections.abc import Callable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the largest tensor that is made while it is on, views of older ones aside."""

    num_bytes: int

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return made
