"""The protobuf messages of the Tinker protocol (package `tinker_public`, proto3), built from a table of field numbers and types."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "str": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "i32": _Field.TYPE_INT32,
    "i64": _Field.TYPE_INT64,
    "u32": _Field.TYPE_UINT32,
    "f64": _Field.TYPE_DOUBLE,
    "bool": _Field.TYPE_BOOL,
    "enum": _Field.TYPE_INT32,  # an open enum and an int32 are the same bytes
}

#: message -> field -> (number, type). `*` repeats; `map` is a map from strings; `?` has presence; `|name` is a member of the oneof `name`.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "EncodedText": {"tokens": (1, "bytes")},
    "Image": {"data": (1, "bytes"), "format": (2, "str")},
    "Dmel": {"data": (1, "bytes")},
    "Chunk": {"encoded_text": (1, "EncodedText|kind"), "image": (2, "Image|kind"), "dmel": (3, "Dmel|kind")},
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "Tensor": {"dense": (1, "bytes|layout"), "sparse_csr": (2, "SparseCsr|layout"), "dtype": (3, "enum"), "shape": (4, "*i64")},
    "Datum": {"model_input": (1, "*Chunk"), "loss_fn_inputs": (2, "map Tensor")},
    "LossConfigValue": {"number": (1, "f64|value"), "text": (2, "str|value")},
    "ForwardBackwardRequest": {
        "model_id": (1, "str"),
        "seq_id": (2, "i32"),
        "data": (3, "*Datum"),
        "loss_fn": (4, "str"),
        "loss_fn_config": (5, "map f64"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "map LossConfigValue"),
    },
    "BatchedTensor": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "enum"), "trailing_shape": (4, "*i64")},
    "ArrayRecord": {"type_tag": (1, "str"), "fields": (2, "map BatchedTensor"), "num_datums": (3, "i64")},
    "ForwardBackwardOutput": {"loss_fn_output_type": (1, "str"), "loss_fn_outputs": (2, "*ArrayRecord"), "metrics": (3, "map f64")},
    "TopkLogprobs": {"token_ids": (1, "bytes"), "logprobs": (2, "bytes"), "k": (3, "u32"), "length": (4, "u32")},
    "SampledSequence": {
        "stop_reason": (1, "enum"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes?"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
    },
    "SampleResponse": {
        "sequences": (1, "*SampledSequence"),
        "prompt_logprobs": (2, "bytes?"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"),
        "prompt_cache_hit_tokens": (4, "i32"),
    },
}
DTYPES = {1: "float32", 2: "int64", 3: "int32", 4: "bfloat16"}
FLOAT32 = 1
STOP, LENGTH = 0, 1


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="hotdesk/tinker.proto", package="tinker_public", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add_field(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tinker_public.{name}")) for name in MESSAGES}


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    kind, _, oneof = kind.partition("|")
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind.startswith("map "):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "str")
        _add_field(entry, "value", 2, kind.removeprefix("map "))
        field.label, kind = _Field.LABEL_REPEATED, f"{message.name}.{entry.name}"
    elif kind.startswith("*"):
        field.label, kind = _Field.LABEL_REPEATED, kind[1:]
    elif kind.endswith("?"):
        kind, oneof, field.proto3_optional = kind[:-1], f"_{name}", True
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".tinker_public.{kind}"
    if oneof:
        names = [one.name for one in message.oneof_decl]
        if oneof not in names:
            message.oneof_decl.add(name=oneof)
            names.append(oneof)
        field.oneof_index = names.index(oneof)


_CLASSES = _build()
ForwardBackwardRequest = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput = _CLASSES["ForwardBackwardOutput"]
SampleResponse = _CLASSES["SampleResponse"]
