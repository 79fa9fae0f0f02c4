"""Engines: what runs a trained network fastest on this machine.

OpenVINO where it is installed and can compile for this CPU, else torch itself. Both compute in 32-bit floats and agree
within 1e-3 in the cosine of a feature row (1e-6 where it was measured), so rows made by one may be compared with rows
made by the other and carry the same encoder_id. A network is compiled for fixed shapes, and what comes out for one
input depends on that input alone: not on those before it, nor on the number of threads.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

logger = logging.getLogger(__name__)

Arrays: TypeAlias = tuple[NDArray[Any], ...]
Engine: TypeAlias = Callable[[Sequence[Arrays]], list[Arrays]]  # the outputs of each tuple of inputs, in order


def fastest(network: nn.Module, example: tuple[Tensor, ...], *, threads: int = 1) -> Engine:
    """The network compiled for inputs of the example's shapes; `network` must give a tuple of tensors."""
    network = copy.deepcopy(network).eval().requires_grad_(False)  # whoever trains it goes on
    return with_openvino(network, example, threads) or with_torch(network, example)


def with_openvino(network: nn.Module, example: tuple[Tensor, ...], threads: int = 1) -> Engine | None:
    """By OpenVINO, `threads` inputs at a time; None where it is not installed or cannot be used here."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # importing OpenVINO would report it
    try:
        import openvino
        from openvino.frontend import FrontEndManager
        from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
    except ImportError:
        return None
    try:
        # Through the front end itself: `openvino.convert_model` would report its use to OpenVINO's makers.
        decoder = TorchScriptPythonDecoder(_traced(network, example))
        front_end = FrontEndManager().load_by_framework("pytorch")
        loaded = front_end.load(decoder)
        model = front_end.convert(loaded)
        model.reshape({port: list(x.shape) for port, x in zip(model.inputs, example, strict=True)})
        exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": threads}
        compiled = openvino.Core().compile_model(model, "CPU", exact)
        requests = [_Request(compiled) for _ in range(threads)]
    except RuntimeError as error:
        logger.warning("OpenVINO cannot run the network here, torch does: %s", str(error).strip().splitlines()[-1])
        return None

    def run(inputs: Sequence[Arrays]) -> list[Arrays]:
        if threads == 1:
            return [requests[0].results_at_once(arrays) for arrays in inputs]
        outputs: list[Arrays] = []
        for n, arrays in enumerate(inputs):
            request = requests[n % threads]
            if n >= threads:
                outputs.append(request.results())
            request.start(arrays)
        outputs += [requests[n % threads].results() for n in range(len(outputs), len(inputs))]
        return outputs

    return run


class _Request:
    """One inference of OpenVINO's at a time, in memory of its own: copied into and out of, which is cheaper than to
    hand arrays over."""

    def __init__(self, compiled: Any) -> None:
        self._request = compiled.create_infer_request()
        self._inputs = [self._request.get_input_tensor(n).data for n in range(len(compiled.inputs))]
        self._outputs = [self._request.get_output_tensor(n).data for n in range(len(compiled.outputs))]

    def start(self, arrays: Arrays) -> None:
        self._fill(arrays)
        self._request.start_async()

    def results(self) -> Arrays:
        self._request.wait()
        return self._taken()

    def results_at_once(self, arrays: Arrays) -> Arrays:
        """Computed in the calling thread."""
        self._fill(arrays)
        self._request.infer(share_outputs=True)
        return self._taken()

    def _fill(self, arrays: Arrays) -> None:
        for own, array in zip(self._inputs, arrays, strict=True):
            np.copyto(own, array)

    def _taken(self) -> Arrays:
        return tuple(np.array(own) for own in self._outputs)


def with_torch(network: nn.Module, example: tuple[Tensor, ...]) -> Engine:
    """By torch, with the weights packed for this machine: half the time of calling the module."""
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    packed = torch.jit.optimize_for_inference(_traced(network, example))
    with torch.inference_mode():
        for _ in range(3):  # the first runs of a trace are slower and may round differently
            packed(*example)

    def run(inputs: Sequence[Arrays]) -> list[Arrays]:
        with torch.inference_mode():
            results = (packed(*(torch.from_numpy(array) for array in arrays)) for arrays in inputs)
            return [tuple(tensor.numpy() for tensor in result) for result in results]

    return run


def _traced(network: nn.Module, example: tuple[Tensor, ...]) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # tracing is called deprecated; what is to replace it needs a C++ compiler
        return torch.jit.trace(network, example, check_trace=False)  # type: ignore[no-untyped-call]
