"""Small encoders as ONNX files, and two that misbehave.

Each takes a picture [1, 3, side, side] and returns a row [1, 512], as the product expects of a named encoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from safetensors.torch import load_file

from reference_db.features.encoder import IMAGENET_MEAN, IMAGENET_STD, FrameEncoder
from reference_db.features.encoder_weights import NETWORK_INPUT, PICTURE_SIDE, SHIPPED_WEIGHTS
from reference_db.store.references import FEATURE_SIZE

HEADER = '<ir_version: 8, opset_import: ["" : 18]>'
PICTURE = f"float{list(NETWORK_INPUT)}"
ROW = f"float[1, {FEATURE_SIZE}]"
N_CELLS = 13  # of a side: 13 x 13 cells of three colours are 507 numbers


def write_grid(path: Path, *, last: float = 0.0, around_mean: bool = False) -> Path:
    """Writes an encoder of the mean colours of 13 x 13 cells, optionally less their mean, and five numbers `last`."""
    graph = f"""
        bands = MatMul(above, pictures)
        cells = MatMul(bands, beside)
        colours = Flatten(cells)
        mean = ReduceMean<keepdims = 0>(colours)
        grid = {"Sub(colours, mean)" if around_mean else "Identity(colours)"}
        rows = Concat<axis = 1>(grid, last)
    """
    five = np.full((1, FEATURE_SIZE - 3 * N_CELLS**2), last, np.float32)
    return _write(path, graph, {**_pooling(N_CELLS), "last": five})


def write_hanging(path: Path) -> Path:
    """Writes an encoder that never returns from a white picture, which is 2.2 to 2.6 by ImageNet's mean and spread."""
    graph = f"""
        light = ReduceMean<keepdims = 0>(pictures)
        is_white = Greater(light, white)
        same = Loop<body = again (int64 round, bool was, {PICTURE} before) => (bool is_still_white, {PICTURE} after) {{
            after = Mul(before, one)
            still = ReduceMean<keepdims = 0>(after)
            is_still_white = Greater(still, white)
        }}>(, is_white, pictures)
        bands = MatMul(above, same)
        cells = MatMul(bands, beside)
        colours = Flatten(cells)
        rows = MatMul(colours, weights)
    """
    weights = np.random.default_rng(0).normal(size=(3 * 8**2, FEATURE_SIZE)).astype(np.float32)
    return _write(path, graph, {**_pooling(8), "weights": weights, "white": np.float32(2), "one": np.float32(1)})


def write_slow(path: Path, n_rounds: int) -> Path:
    """Writes the shipped frame encoder, repeated n_rounds times more for a bright picture than for a dark one."""
    graph = f"""
        scaled = Mul(pictures, imagenet_std)
        light = Add(scaled, imagenet_mean)
        squares = Mul(light, contrast)
        level = ReduceMean<keepdims = 0>(light)
        is_bright = Greater(level, half)
        more = Where(is_bright, n_rounds, none)
        rounds = Add(more, one)
        rows = Loop<body = again (int64 round, bool was, {ROW} before) => (bool continues, {ROW} after) {{
            continues = Identity(was)
            trace = ReduceMean<keepdims = 0>(before)
            nothing = Mul(trace, tiny)
            uneven = Add(squares, nothing)
            shifted = Sub(uneven, grey)
        }}>(rounds, , first)
    """
    constants = {
        "imagenet_std": np.array(IMAGENET_STD, np.float32).reshape(3, 1, 1),
        "imagenet_mean": np.array(IMAGENET_MEAN, np.float32).reshape(3, 1, 1),
        "contrast": np.float32(255 / 128),
        "grey": np.float32(127 / 128),
        "half": np.float32(0.5),
        "tiny": np.float32(1e-30),  # so that OpenVINO cannot skip a round as equal to the previous one
        "n_rounds": np.int64(n_rounds),
        "none": np.int64(0),
        "one": np.int64(1),
        "first": np.zeros((1, FEATURE_SIZE), np.float32),
    }
    return _write(path, graph, constants, body=_shipped(path))


def _shipped(path: Path) -> onnx.GraphProto:
    network = FrameEncoder().eval()
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(SHIPPED_WEIGHTS).items()})
    example = (torch.zeros(NETWORK_INPUT),)
    torch.onnx.export(network, example, path, input_names=["shifted"], output_names=["after"], external_data=False)
    return onnx.load(path).graph


def _write(path: Path, graph: str, constants: dict[str, Any], body: onnx.GraphProto | None = None) -> Path:
    """Writes the graph; the nodes of `body` are added to those of its loop."""
    model = onnx.parser.parse_model(f"{HEADER} encoder ({PICTURE} pictures) => ({ROW} rows) {{{graph}}}")
    model.graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in constants.items())
    if body is not None:
        (loop,) = (node for node in model.graph.node if node.op_type == "Loop")
        loop.attribute[0].g.node.extend(body.node)
        model.graph.initializer.extend(body.initializer)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path


def _pooling(n: int) -> dict[str, NDArray[np.float32]]:
    """Matrices that average a picture into n x n cells, as torch's adaptive average pooling does."""
    shares = np.zeros((n, PICTURE_SIDE), np.float32)
    for cell in range(n):
        first, end = cell * PICTURE_SIDE // n, -(-(cell + 1) * PICTURE_SIDE // n)
        shares[cell, first:end] = 1 / (end - first)
    return {"above": shares, "beside": shares.T.copy()}
