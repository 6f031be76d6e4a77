"""What the SDK's own encoders write is read, and what is written its own decoders read: several targets a token, dense and sparse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from scheduler.gateway import translate, wire
from state.errors import BadBody
from state.requests import ForwardResult, Tensor


def sent(targets: types.TensorData, weights: types.TensorData) -> bytes:
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3, 4]), loss_fn_inputs={"target_tokens": targets, "weights": weights})
    body = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(model_id="m", seq_id=1, forward_backward_input=body)
    return forward_backward_request_to_proto(request).SerializeToString()


@pytest.mark.parametrize(("encode", "sparse"), [(types.TensorData.from_torch, False), (types.TensorData.from_torch_sparse, True)])
def test_several_targets_of_a_token_arrive_dense_and_sparse(encode, sparse):
    targets = torch.zeros(4, 8, dtype=torch.long)
    weights = torch.zeros(4, 8)
    targets[1, 0], targets[3, 7], weights[1, 0], weights[3, 7] = 5, 9, 0.25, 0.75
    message = translate.forward_backward(sent(encode(targets), encode(weights)))
    assert (message.data[0].loss_fn_inputs["weights"].WhichOneof("layout") == "sparse_csr") == sparse
    [datum] = translate.forward_body(message).data
    assert datum.inputs["target_tokens"] == Tensor("int64", (4, 8), targets.numpy().astype("<i8").tobytes())
    assert datum.inputs["weights"] == Tensor("float32", (4, 8), weights.numpy().astype("<f4").tobytes())


def csr(values: list[float], starts: list[int], columns: list[int], shape: list[int], dtype: int = 1) -> wire.ForwardBackwardRequest:
    message = wire.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    tensor = message.data.add().loss_fn_inputs["weights"]
    tensor.dtype = dtype
    tensor.shape.extend(shape)
    tensor.sparse_csr.values = np.asarray(values, "<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(starts, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray(columns, "<i8").tobytes()
    return message


@pytest.mark.parametrize(
    "broken",
    [
        csr([1.0], [0, 1], [2], [1, 2]),  # a column that is not there
        csr([1.0], [0, 1], [-1], [1, 2]),
        csr([1.0], [1, 1], [0], [1, 2]),  # does not begin at 0
        csr([1.0, 2.0], [0, 2, 1], [0, 1], [2, 2]),  # goes back
        csr([1.0], [0, 1, 1], [0], [1, 2]),  # more rows than the shape has
        csr([1.0, 2.0], [0, 1], [0], [1, 2]),  # more values than columns
        csr([], [], [], [1, 2]),
        csr([1.0], [0, 1], [0], [2**31, 2**31]),  # what would be made of it is too large
        csr([1.0], [0, 1], [0], [2**33, 0]),
        csr([1.0], [0, 2**40], [0], [1, 2]),  # rows that would be as many as that
        csr([1.0], [0, 1], [0], [2]),
        csr([1.0], [0, 1], [0], [1, 2], dtype=4),
    ],
)
def test_a_sparse_tensor_that_is_none_is_refused(broken):
    with pytest.raises(BadBody, match=r"weights of datum 0|values in all"):
        translate.forward_body(broken)


def test_sparse_tensors_are_bounded_in_sum():
    message = csr([], [0] * 2001, [], [2000, 256])
    for _ in range(7):
        message.data.append(message.data[0])
    with pytest.raises(BadBody, match="4096000 values in all"):
        translate.forward_body(message)
    del message.data[1:]
    assert len(translate.forward_body(message).data[0].inputs["weights"].data) == 4 * 2000 * 256


def test_logprobs_of_several_targets_are_told_in_their_shape():
    rows = [np.arange(size, dtype="<f4") for size in (8, 4, 3)]
    result = ForwardResult(
        tuple(Tensor("float32", shape, row.tobytes()) for shape, row in zip(((4, 2), (2, 2), (3,)), rows)), {"loss:sum": 1.0}
    )
    told = deserialize_forward_backward_output(translate.forward_output(result)).loss_fn_outputs
    assert [one["logprobs"].shape for one in told] == [[4, 2], [2, 2], [3]]
    assert [one["logprobs"].to_numpy().ravel().tolist() for one in told] == [row.tolist() for row in rows]
