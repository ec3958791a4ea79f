"""The messages of Envoy's external processing and of gRPC's health checks, as far as the picker uses them.

They are built from a table when this module is loaded: generated code would be longer, need a compiler, and tie us to
versions of protobuf, and the package that has it for Python replaces files of other packages. Fields that are not here
are skipped when a message is read, and names of messages are not sent, so proxies see no difference. The names are ours
because a process can load only one definition of each.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from google.protobuf import message_factory, struct_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default

_PACKAGE: Final = "minisgl.ext_proc"
_STRUCT: Final = "google.protobuf.Struct"


class _Field(NamedTuple):
    number: int
    kind: str
    """`bool`, `int32`, `string` or `bytes`, otherwise a message. Enumerations are sent as `int32`."""
    group: str = ""
    """Name of the `oneof` that it belongs to."""
    repeated: bool = False


_MESSAGES: Final[dict[str, dict[str, _Field]]] = {
    "ProcessingRequest": {
        "request_headers": _Field(2, "HttpHeaders", "request"),
        "response_headers": _Field(3, "HttpHeaders", "request"),
        "request_body": _Field(4, "HttpBody", "request"),
        "response_body": _Field(5, "HttpBody", "request"),
        "request_trailers": _Field(6, "HttpTrailers", "request"),
        "response_trailers": _Field(7, "HttpTrailers", "request"),
        "metadata_context": _Field(8, "Metadata"),
        "observability_mode": _Field(10, "bool"),
        "protocol_config": _Field(11, "ProtocolConfiguration"),
    },
    "ProtocolConfiguration": {
        "request_body_mode": _Field(1, "int32"),
        "response_body_mode": _Field(2, "int32"),
    },
    "HttpHeaders": {"headers": _Field(1, "HeaderMap"), "end_of_stream": _Field(3, "bool")},
    "HttpBody": {"body": _Field(1, "bytes"), "end_of_stream": _Field(2, "bool")},
    "HttpTrailers": {"trailers": _Field(1, "HeaderMap")},
    "HeaderMap": {"headers": _Field(1, "HeaderValue", repeated=True)},
    "HeaderValue": {
        "key": _Field(1, "string"),
        "value": _Field(2, "string"),
        "raw_value": _Field(3, "bytes"),
    },
    # A map is sent as its entries.
    "Metadata": {"filter_metadata": _Field(1, "MetadataEntry", repeated=True)},
    "MetadataEntry": {"key": _Field(1, "string"), "value": _Field(2, _STRUCT)},
    "ProcessingResponse": {
        "request_headers": _Field(1, "HeadersResponse", "response"),
        "response_headers": _Field(2, "HeadersResponse", "response"),
        "request_body": _Field(3, "BodyResponse", "response"),
        "response_body": _Field(4, "BodyResponse", "response"),
        "request_trailers": _Field(5, "TrailersResponse", "response"),
        "response_trailers": _Field(6, "TrailersResponse", "response"),
        "immediate_response": _Field(7, "ImmediateResponse", "response"),
        "dynamic_metadata": _Field(8, _STRUCT),
    },
    "HeadersResponse": {"response": _Field(1, "CommonResponse")},
    "BodyResponse": {"response": _Field(1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": _Field(1, "HeaderMutation")},
    "CommonResponse": {
        "header_mutation": _Field(2, "HeaderMutation"),
        "body_mutation": _Field(3, "BodyMutation"),
    },
    "HeaderMutation": {
        "set_headers": _Field(1, "HeaderValueOption", repeated=True),
        "remove_headers": _Field(2, "string", repeated=True),
    },
    "HeaderValueOption": {"header": _Field(1, "HeaderValue"), "append_action": _Field(3, "int32")},
    "BodyMutation": {
        "body": _Field(1, "bytes", "mutation"),
        "clear_body": _Field(2, "bool", "mutation"),
        "streamed_response": _Field(3, "StreamedBodyResponse", "mutation"),
    },
    "StreamedBodyResponse": {"body": _Field(1, "bytes"), "end_of_stream": _Field(2, "bool")},
    "ImmediateResponse": {
        "status": _Field(1, "HttpStatus"),
        "headers": _Field(2, "HeaderMutation"),
        "body": _Field(3, "bytes"),
        "details": _Field(5, "string"),
    },
    "HttpStatus": {"code": _Field(1, "int32")},
    "HealthCheckRequest": {"service": _Field(1, "string")},
    "HealthCheckResponse": {"status": _Field(1, "int32")},
}

_SCALARS: Final = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
}


def _classes() -> dict[str, Any]:
    """Return the class of each message."""
    file = FileDescriptorProto(name="minisgl/ext_proc.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, field in fields.items():
            added = message.field.add(name=field_name, number=field.number)
            added.label = added.LABEL_REPEATED if field.repeated else added.LABEL_OPTIONAL
            if field.kind in _SCALARS:
                added.type = _SCALARS[field.kind]
            else:
                added.type = added.TYPE_MESSAGE
                added.type_name = f".{field.kind}" if field.kind == _STRUCT else f".{_PACKAGE}.{field.kind}"
            if field.group:
                # No message has two.
                if not message.oneof_decl:
                    message.oneof_decl.add(name=field.group)
                added.oneof_index = 0
    pool = Default()
    pool.AddSerializedFile(file.SerializeToString())
    found = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(found[name]) for name in _MESSAGES}


_CLASSES: Final = _classes()

# They have no types, so messages are `Any` in what uses them.
ProcessingRequest: Final[Any] = _CLASSES["ProcessingRequest"]
ProcessingResponse: Final[Any] = _CLASSES["ProcessingResponse"]
HealthCheckRequest: Final[Any] = _CLASSES["HealthCheckRequest"]
HealthCheckResponse: Final[Any] = _CLASSES["HealthCheckResponse"]
