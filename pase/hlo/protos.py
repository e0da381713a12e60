"""Parses protobuf messages of programs, traces and memory profiles, from declarations of the few fields needed.

Field numbers: openxla/xla, xla/service/hlo.proto, xla/xla_data.proto, xla/tsl/profiler/protobuf/xplane.proto;
google/pprof, proto/profile.proto.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from pase.errors import PaseError, needed

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["parse"]

# message → {field: (number, type)}. "*" marks a repeated field, "{}" a map from int64; message types are capitalized.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "HloProto": {"hlo_module": (1, "HloModuleProto")},
    "HloModuleProto": {
        "name": (1, "string"),
        "computations": (3, "*HloComputationProto"),
        "entry_computation_id": (6, "int64"),
        "schedule": (7, "HloScheduleProto"),
        "stack_frame_index": (17, "StackFrames"),
    },
    "HloComputationProto": {
        "name": (1, "string"),
        "instructions": (2, "*HloInstructionProto"),
        "id": (5, "int64"),
        "root_id": (6, "int64"),
    },
    "HloInstructionProto": {
        "name": (1, "string"),
        "opcode": (2, "string"),
        "shape": (3, "ShapeProto"),
        "metadata": (7, "OpMetadata"),
        "literal": (8, "LiteralProto"),
        "parameter_number": (9, "int64"),
        "tuple_index": (13, "int64"),
        "convolution_dimension_numbers": (16, "ConvolutionDims"),
        "dynamic_slice_sizes": (20, "*int64"),
        "custom_call_target": (28, "string"),
        "dot_dimension_numbers": (30, "DotDims"),
        "id": (35, "int64"),
        "operand_ids": (36, "*int64"),
        "control_predecessor_ids": (37, "*int64"),
        "called_computation_ids": (38, "*int64"),
        "backend_config": (43, "bytes"),
        "replica_groups": (49, "*ReplicaGroup"),  # until 2024; newer XLA uses one of the three lists below
        "source_target_pairs": (52, "*SourceTarget"),
        "comparison_direction": (63, "string"),
        "collective_device_list": (87, "CollectiveDeviceList"),
        "iota_collective_device_list": (92, "IotaGroups"),
        "mesh_axes_replica_group_list": (93, "MeshGroups"),
    },
    "OpMetadata": {
        "op_name": (2, "string"),
        "source_file": (3, "string"),
        "source_line": (4, "int64"),
        "stack_frame_id": (15, "int64"),
    },
    "ConvolutionDims": {
        "kernel_output_feature_dimension": (4, "int64"),
        "output_feature_dimension": (10, "int64"),
    },
    "DotDims": {"lhs_contracting_dimensions": (1, "*int64")},
    "StackFrames": {
        "file_names": (1, "*string"),
        "file_locations": (3, "*FileLocation"),
        "stack_frames": (4, "*StackFrame"),
    },
    "FileLocation": {"file_name_id": (1, "int64"), "line": (3, "int64")},
    "StackFrame": {"file_location_id": (1, "int64"), "parent_frame_id": (2, "int64")},
    "LiteralProto": {
        "s32s": (4, "*int32"),
        "s64s": (5, "*int64"),
        "u32s": (6, "*uint32"),
        "u64s": (7, "*uint64"),
    },
    "SourceTarget": {"source": (1, "int64"), "target": (2, "int64")},
    "CollectiveDeviceList": {
        "replica_groups": (1, "*ReplicaGroup"),
        "iota_replica_group_list": (2, "IotaGroups"),
    },
    "IotaGroups": {
        "num_replica_groups": (1, "int64"),
        "num_devices_per_group": (2, "int64"),
        "iota_reshape_dims": (3, "*int64"),
        "iota_transpose_perm": (4, "*int64"),
    },
    "MeshGroups": {"mesh": (1, "MeshOfDevices"), "axes": (2, "*AxisRef")},
    "MeshOfDevices": {
        "axes": (1, "*MeshAxis"),
        "device_ids": (2, "*int64"),
        "iota_device_ids": (3, "IotaDevices"),
    },
    "MeshAxis": {"name": (1, "string"), "size": (2, "int64")},
    "IotaDevices": {"dims": (1, "*int64"), "perm": (2, "*int64")},
    "AxisRef": {"mesh_axis_index": (1, "int64"), "sub_axis_info": (2, "SubAxis")},
    "SubAxis": {"pre_size": (1, "int64"), "size": (2, "int64")},
    "ReplicaGroup": {"replica_ids": (1, "*int64")},
    "ShapeProto": {
        "element_type": (2, "int64"),
        "dimensions": (3, "*int64"),
        "tuple_shapes": (4, "*ShapeProto"),
    },
    "HloScheduleProto": {"sequences": (1, "{}InstructionSequence")},
    "InstructionSequence": {"instruction_ids": (1, "*int64")},
    "XSpace": {"planes": (1, "*XPlane"), "hostnames": (4, "*string")},
    "XPlane": {
        "name": (2, "string"),
        "lines": (3, "*XLine"),
        "event_metadata": (4, "{}XEventMetadata"),
        "stat_metadata": (5, "{}XStatMetadata"),
        "stats": (6, "*XStat"),
    },
    "XLine": {
        "id": (1, "int64"),
        "name": (2, "string"),
        "timestamp_ns": (3, "int64"),
        "events": (4, "*XEvent"),
        "display_name": (11, "string"),
    },
    "XEvent": {
        "metadata_id": (1, "int64"),
        "offset_ps": (2, "int64"),
        "duration_ps": (3, "int64"),
        "stats": (4, "*XStat"),
    },
    "XStat": {
        "metadata_id": (1, "int64"),
        "double_value": (2, "double"),
        "uint64_value": (3, "uint64"),
        "int64_value": (4, "int64"),
        "str_value": (5, "string"),
        "bytes_value": (6, "bytes"),
        "ref_value": (7, "uint64"),
    },
    "XEventMetadata": {"name": (2, "string"), "display_name": (4, "string"), "stats": (5, "*XStat")},
    "XStatMetadata": {"name": (2, "string")},
    "Profile": {
        "sample_type": (1, "*ProfileUnit"),
        "sample": (2, "*ProfileSample"),
        "location": (4, "*ProfileLocation"),
        "function": (5, "*ProfileFunction"),
        "string_table": (6, "*string"),
    },
    "ProfileUnit": {"type": (1, "int64"), "unit": (2, "int64")},
    "ProfileSample": {
        "location_id": (1, "*uint64"),
        "value": (2, "*int64"),
        "label": (3, "*ProfileLabel"),
    },
    "ProfileLabel": {"key": (1, "int64"), "str": (2, "int64")},
    "ProfileLocation": {"id": (1, "uint64"), "line": (4, "*ProfileLine")},
    "ProfileLine": {"function_id": (1, "uint64"), "line": (2, "int64")},
    "ProfileFunction": {"id": (1, "uint64"), "name": (2, "int64"), "filename": (4, "int64")},
}


@cache
def _classes() -> dict[str, type[Message]]:
    """The protobuf class of each message, made from ``_MESSAGES`` at run time."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    fd = descriptor_pb2.FieldDescriptorProto
    types = {
        "string": fd.TYPE_STRING,
        "int32": fd.TYPE_INT32,
        "int64": fd.TYPE_INT64,
        "uint32": fd.TYPE_UINT32,
        "uint64": fd.TYPE_UINT64,
        "double": fd.TYPE_DOUBLE,
        "bytes": fd.TYPE_BYTES,
    }
    # proto3, as in XLA's own files: it rejects a string that is not UTF-8, which proto2 would return as bytes.
    f = descriptor_pb2.FileDescriptorProto(name="pase/traces.proto", package="pase.traces", syntax="proto3")
    for message, fields in _MESSAGES.items():
        m = f.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            repeated, is_map = kind.startswith("*"), kind.startswith("{}")
            kind = kind.lstrip("*{}")
            label = fd.LABEL_REPEATED if repeated or is_map else fd.LABEL_OPTIONAL
            field = m.field.add(name=name, number=number, label=label)
            if kind in types:
                field.type = types[kind]
                continue
            field.type, field.type_name = fd.TYPE_MESSAGE, f".pase.traces.{kind}"
            if is_map:
                entry = name.title().replace("_", "") + "Entry"
                nested = m.nested_type.add(name=entry)
                nested.options.map_entry = True
                nested.field.add(name="key", number=1, label=fd.LABEL_OPTIONAL, type=fd.TYPE_INT64)
                value = nested.field.add(
                    name="value", number=2, label=fd.LABEL_OPTIONAL, type=fd.TYPE_MESSAGE
                )
                value.type_name = f".pase.traces.{kind}"
                field.type_name = f".pase.traces.{message}.{entry}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(f)
    return {
        m: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"pase.traces.{m}")) for m in _MESSAGES
    }


def parse(message: str, data: bytes, where: str) -> Message:
    """Parses a message of the named type. Raises PaseError if the bytes are not one."""
    errors = needed("google.protobuf.message", where)
    try:
        return _classes()[message].FromString(data)
    except (errors.DecodeError, RecursionError) as e:
        raise PaseError(f"not a readable {message} ({e})", where=where) from e
