"""Our torch networks as OpenVINO models.

`torch.fx` records which torch operations a network calls, and each is translated to an operation of OpenVINO. The usual
way, `torch.export` and then `openvino.convert_model`, gives the same model, but it imports torch's compiler: 4.5 s and
190 MB more in every process that starts, where this takes 0.1 s. Only the operations that our networks use are
translated; a network that calls another one needs a line in OPERATIONS.

Call `engines.has_openvino` before importing this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import openvino
import openvino.opset13 as ops
import torch
from torch import Tensor, fx, nn

Node: TypeAlias = Any  # an openvino Node
LAST = np.iinfo(np.int64).max  # the end of a slice that has none


def openvino_model(network: nn.Module, example: tuple[Tensor, ...]) -> openvino.Model:
    """The network for inputs of the example's shapes and types; it must return a tuple of tensors."""
    inputs = [ops.parameter(list(tensor.shape), tensor.numpy().dtype) for tensor in example]
    return openvino.Model(list(_Translator(network).run(*inputs)), inputs)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False  # down to functions, so that OPERATIONS needs no layers


class _Translator(fx.Interpreter):
    """Walks the recorded calls and builds an OpenVINO node for each."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network, graph=_Tracer().trace(network))
        self.extra_traceback = False  # errors stay one sentence

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Node:
        return ops.constant(super().get_attr(target, args, kwargs).detach().numpy())

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Node:
        return _operation(target.__name__)(*args, **kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Node:
        return _operation(str(target))(*args, **kwargs)


def _operation(name: str) -> Callable[..., Node]:
    try:
        return OPERATIONS[name]
    except KeyError:
        raise LookupError(f"no translation of torch's {name} to OpenVINO; add it to OPERATIONS") from None


def _of_two(operation: Callable[[Node, Node], Node]) -> Callable[[Any, Any], Node]:
    def build(left: Any, right: Any) -> Node:
        return operation(*(ops.constant(np.float32(x)) if isinstance(x, int | float) else x for x in (left, right)))

    return build


def _conv2d(
    x: Node,
    weight: Node,
    bias: Node,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Node:
    sides = [list(part) for part in (stride, padding, padding, dilation)]
    if groups == 1:
        filtered = ops.convolution(x, weight, *sides)
    else:
        n_out, *rest = weight.shape
        filtered = ops.group_convolution(x, _reshape(weight, groups, n_out // groups, *rest), *sides)
    return ops.add(filtered, _reshape(bias, 1, -1, 1, 1))


def _linear(x: Node, weight: Node, bias: Node) -> Node:
    return ops.add(ops.matmul(x, weight, transpose_a=False, transpose_b=True), bias)


def _pad(x: Node, widths: Sequence[int], mode: str, value: None) -> Node:
    """Zeros around the last axes; widths begin with the last one's."""
    none = [0] * (len(x.shape) - len(widths) // 2)
    return ops.pad(x, none + list(widths[-2::-2]), none + list(widths[::-2]), mode, np.float32(0))


def _reshape(x: Node, *shape: int) -> Node:
    return ops.reshape(x, list(shape), special_zero=True)  # 0: as it was


def _normalize(x: Node, p: float, dim: int, eps: float, out: None) -> Node:
    if p != 2:
        raise LookupError(f"no translation of a norm of order {p} to OpenVINO")
    return ops.divide(x, ops.maximum(ops.reduce_l2(x, [dim], keep_dims=True), np.float32(eps)))


def _getitem(x: Node, index: tuple[int | slice, ...]) -> Node:
    first = [part if isinstance(part, int) else part.start or 0 for part in index]
    end = [part + 1 if isinstance(part, int) else LAST if part.stop is None else part.stop for part in index]
    cut = ops.slice(x, first, end, [1] * len(index), list(range(len(index))))
    return _without_axes(cut, [axis for axis, part in enumerate(index) if isinstance(part, int)])


def _without_axes(x: Node, axes: list[int]) -> Node:
    return ops.squeeze(x, axes) if axes else x


def _argmax(x: Node, dim: int) -> Node:
    return _without_axes(ops.topk(x, 1, dim, "max", "value").output(1), [dim])


TYPES = {torch.uint8: np.uint8}
OPERATIONS: dict[str, Callable[..., Node]] = {
    "add": _of_two(ops.add),
    "argmax": _argmax,
    "clamp": lambda x, min: ops.maximum(x, np.float32(min)),
    "conv2d": _conv2d,
    "flatten": lambda x, start: _reshape(x, *[0] * start, -1),
    "float": lambda x: ops.convert(x, np.float32),
    "getitem": _getitem,
    "linear": _linear,
    "mean": lambda x, dim: ops.reduce_mean(x, [dim], keep_dims=False),
    "mul": _of_two(ops.multiply),
    "normalize": _normalize,
    "pad": _pad,
    "permute": lambda x, *order: ops.transpose(x, list(order)),
    "pow": _of_two(ops.power),
    "relu": ops.relu,
    "relu6": lambda x, inplace: ops.clamp(x, 0.0, 6.0),
    "sigmoid": ops.sigmoid,
    "sub": _of_two(ops.subtract),
    "to": lambda x, dtype: ops.convert(x, TYPES[dtype]),
    "truediv": _of_two(ops.divide),
}
