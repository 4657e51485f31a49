"""What a framework must provide: tensors and small questions about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any


class Tensors(ABC):
    """Plain tensors."""

    @staticmethod
    @abstractmethod
    def is_tensor(obj: Any) -> bool:
        """Whether ``obj`` is a tensor of this framework."""

    @staticmethod
    @abstractmethod
    def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
        """Concatenate."""

    @staticmethod
    @abstractmethod
    def chunk(data: Any, split_dim: int, split_size: int, index: int) -> Any:
        """Part ``index`` of ``split_size`` parts of a dim: ceil-sized blocks, the last ones short or empty."""

    @staticmethod
    @abstractmethod
    def arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None, device: Any = None) -> Any:
        """``range`` as a tensor."""

    @staticmethod
    @abstractmethod
    def zeros(size: Any, dtype: Any = None, device: Any = None) -> Any:
        """A tensor of zeros."""

    @staticmethod
    @abstractmethod
    def full_like(tensor: Any, fill_value: Any, dtype: Any = None) -> Any:
        """A constant tensor of the same shape."""

    @staticmethod
    @abstractmethod
    def empty_like(tensor: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False) -> Any:
        """Unset memory of the same shape."""

    @staticmethod
    @abstractmethod
    def new_tensor(tensor_shape: Any, tensor_type: Any, device: Any) -> Any:
        """Unset memory."""

    @staticmethod
    @abstractmethod
    def new_zero_parameter(param_shape: Any, param_type: Any, requires_grad: bool, device: Any) -> Any:
        """A parameter of zeros."""

    @staticmethod
    @abstractmethod
    def tensor_type_cast(input_data: Any, cast_type: Any) -> Any:
        """The tensor in another dtype, given as a dtype or by name."""

    @staticmethod
    @abstractmethod
    def cross_entropy_sum(logits: Any, targets: Any, ignored: int) -> Any:
        """The sum of the cross entropies of rows of logits with classes, in float32 or wider; a target ``ignored``
        counts nothing."""

    @abstractmethod
    def cast_fp_tensor(self, dtype: Any, x: Any) -> Any:
        """``x`` in ``dtype`` when it is a floating tensor; anything else unchanged."""

    @staticmethod
    @abstractmethod
    def tensor_to_numpy(tensor: Any) -> Any:
        """The values as a numpy array; types numpy lacks (bfloat16, float8) as float32."""

    @staticmethod
    @abstractmethod
    def get_element_size(tensor: Any) -> int:
        """Bytes per element."""

    @staticmethod
    @abstractmethod
    def get_tensor_storage_size(tensor: Any) -> int:
        """Bytes of the tensor's elements."""

    @abstractmethod
    def str_to_dtype(self, dtype_str: str) -> Any:
        """The dtype named by ``"float32"``, ``"torch.float32"`` and the like."""

    @staticmethod
    def why_no_computation_in(dtype: Any) -> str | None:
        """Why models cannot compute in this dtype here; None where they can."""
        del dtype
        return None

    @abstractmethod
    def list_to_size(self, size_list: Sequence[int]) -> Any:
        """The framework's own shape type."""

    @staticmethod
    @abstractmethod
    def construct_strided_slice(x: Any, begin: Sequence[int], end: Sequence[int], stride: Sequence[int]) -> Any:
        """``x[begin:end:stride]`` in every dim."""

    @staticmethod
    @abstractmethod
    def set_tensor_requires_grad(input_tensor: Any) -> Any:
        """Ask for this tensor's gradient; the tensor."""

    @abstractmethod
    def tree_map(self, fn: Callable[[Any], Any], tree: Any) -> Any:
        """``fn`` on every leaf of nested containers."""

    @abstractmethod
    def apply_to_tensors(self, fn: Callable[[Any], Any], container: Any) -> Any:
        """``fn`` on every tensor in nested containers, the rest unchanged."""

    @staticmethod
    @abstractmethod
    def get_op_name(func: Callable[..., Any]) -> str:
        """The canonical name of an operator, however it was reached."""
