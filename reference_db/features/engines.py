"""Engines: run a trained network on this machine's CPU.

OpenVINO where it is installed and can compile for this CPU, else torch itself, at about half the speed. Both compute in
32-bit floats and agree within 1e-3 in the cosine of a feature row (1e-6 where it was measured), so rows made by one may
be compared with rows made by the other and carry the same encoder_id. A network is compiled for fixed shapes, and an
output depends on its input alone: not on the inputs before it, nor on the number of threads.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

logger = logging.getLogger(__name__)

Arrays: TypeAlias = tuple[NDArray[Any], ...]
Engine: TypeAlias = Callable[[Sequence[Arrays]], list[Arrays]]  # the outputs of each tuple of inputs, in order


def compile_network(network: nn.Module, example: tuple[Tensor, ...], *, threads: int = 1) -> Engine:
    """An engine for inputs of the example's shapes; `network` must return a tuple of tensors."""
    network = copy.deepcopy(network).eval().requires_grad_(False)  # the caller may continue to train it
    return openvino_engine(network, example, threads) or torch_engine(network)


def openvino_engine(network: nn.Module, example: tuple[Tensor, ...], threads: int = 1) -> Engine | None:
    """The network on OpenVINO, `threads` inputs at a time; None where it is not installed or cannot be used here."""
    if not has_openvino():
        return None
    from reference_db.features.openvino_graph import openvino_model

    try:
        return _compile(openvino_model(network, example), threads)
    except RuntimeError as error:
        logger.warning("OpenVINO cannot run the network here, torch does: %s", last_line(error))
        return None


def onnx_engine(content: bytes, shape: tuple[int, ...], threads: int = 1) -> Engine:
    """An ONNX model of one input on OpenVINO, which must be installed. Raises RuntimeError where it cannot be run."""
    import openvino

    model = openvino.Core().read_model(content)
    if (n_inputs := len(model.inputs)) != 1 or (n_outputs := len(model.outputs)) != 1:
        raise RuntimeError(f"it has {n_inputs} inputs and {n_outputs} outputs, not one of each")
    model.reshape(list(shape))
    return _compile(model, threads)


def has_openvino() -> bool:
    """Whether OpenVINO can be imported; call this before any import of it."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # it would report our use of OpenVINO
    try:
        import openvino  # noqa: F401
    except ImportError:
        return False
    return True


def last_line(error: Exception) -> str:
    """The reason in an error of OpenVINO, which begins with places in its source."""
    return str(error).strip().splitlines()[-1]


def _compile(model: Any, threads: int) -> Engine:
    import openvino

    exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": threads}
    compiled = openvino.Core().compile_model(model, "CPU", exact)
    requests = [_Request(compiled) for _ in range(threads)]

    def run(inputs: Sequence[Arrays]) -> list[Arrays]:
        if threads == 1:
            return [requests[0].infer(arrays) for arrays in inputs]
        outputs: list[Arrays] = []
        for n, arrays in enumerate(inputs):
            request = requests[n % threads]
            if n >= threads:
                outputs.append(request.wait())
            request.start(arrays)
        outputs += [requests[n % threads].wait() for n in range(len(outputs), len(inputs))]
        return outputs

    return run


class _Request:
    """One inference of OpenVINO at a time, in memory of its own: to copy in and out is cheaper than to pass arrays."""

    def __init__(self, compiled: Any) -> None:
        self._request = compiled.create_infer_request()
        self._inputs = [self._request.get_input_tensor(n).data for n in range(len(compiled.inputs))]
        self._outputs = [self._request.get_output_tensor(n).data for n in range(len(compiled.outputs))]

    def infer(self, arrays: Arrays) -> Arrays:
        """The outputs, computed in the calling thread."""
        self._fill(arrays)
        self._request.infer(share_outputs=True)
        return self._copies()

    def start(self, arrays: Arrays) -> None:
        self._fill(arrays)
        self._request.start_async()

    def wait(self) -> Arrays:
        """The outputs of the inference that was started."""
        self._request.wait()
        return self._copies()

    def _fill(self, arrays: Arrays) -> None:
        for own, array in zip(self._inputs, arrays, strict=True):
            np.copyto(own, array)

    def _copies(self) -> Arrays:
        return tuple(np.array(own) for own in self._outputs)


def torch_engine(network: nn.Module) -> Engine:
    """The network on torch, for any shape."""
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a sixth faster

    def run(inputs: Sequence[Arrays]) -> list[Arrays]:
        with torch.inference_mode():
            results = (network(*(torch.from_numpy(array) for array in arrays)) for arrays in inputs)
            return [tuple(tensor.numpy() for tensor in result) for result in results]

    return run
