from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListPodsResponse(_message.Message):
    __slots__ = ("pods",)
    PODS_FIELD_NUMBER: _ClassVar[int]
    pods: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, pods: _Optional[_Iterable[bytes]] = ...) -> None: ...

class WatchPodsEvent(_message.Message):
    __slots__ = ("type", "pod")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    type: int
    pod: bytes
    def __init__(self, type: _Optional[int] = ..., pod: _Optional[bytes] = ...) -> None: ...

class Pod(_message.Message):
    __slots__ = ("metadata", "spec", "status")
    METADATA_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    metadata: ObjectMeta
    spec: PodSpec
    status: PodStatus
    def __init__(self, metadata: _Optional[_Union[ObjectMeta, _Mapping]] = ..., spec: _Optional[_Union[PodSpec, _Mapping]] = ..., status: _Optional[_Union[PodStatus, _Mapping]] = ...) -> None: ...

class ObjectMeta(_message.Message):
    __slots__ = ("name", "namespace", "uid", "labels", "annotations")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ANNOTATIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    uid: str
    labels: _containers.RepeatedCompositeFieldContainer[Entry]
    annotations: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ..., uid: _Optional[str] = ..., labels: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., annotations: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class PodSpec(_message.Message):
    __slots__ = ("containers", "scheduler_name")
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_NAME_FIELD_NUMBER: _ClassVar[int]
    containers: _containers.RepeatedCompositeFieldContainer[Container]
    scheduler_name: str
    def __init__(self, containers: _Optional[_Iterable[_Union[Container, _Mapping]]] = ..., scheduler_name: _Optional[str] = ...) -> None: ...

class Container(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PodStatus(_message.Message):
    __slots__ = ("container_statuses", "init_container_statuses", "ephemeral_container_statuses")
    CONTAINER_STATUSES_FIELD_NUMBER: _ClassVar[int]
    INIT_CONTAINER_STATUSES_FIELD_NUMBER: _ClassVar[int]
    EPHEMERAL_CONTAINER_STATUSES_FIELD_NUMBER: _ClassVar[int]
    container_statuses: _containers.RepeatedCompositeFieldContainer[ContainerStatus]
    init_container_statuses: _containers.RepeatedCompositeFieldContainer[ContainerStatus]
    ephemeral_container_statuses: _containers.RepeatedCompositeFieldContainer[ContainerStatus]
    def __init__(self, container_statuses: _Optional[_Iterable[_Union[ContainerStatus, _Mapping]]] = ..., init_container_statuses: _Optional[_Iterable[_Union[ContainerStatus, _Mapping]]] = ..., ephemeral_container_statuses: _Optional[_Iterable[_Union[ContainerStatus, _Mapping]]] = ...) -> None: ...

class ContainerStatus(_message.Message):
    __slots__ = ("name", "container_id", "allocated_resources_status")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_RESOURCES_STATUS_FIELD_NUMBER: _ClassVar[int]
    name: str
    container_id: str
    allocated_resources_status: _containers.RepeatedCompositeFieldContainer[ResourceStatus]
    def __init__(self, name: _Optional[str] = ..., container_id: _Optional[str] = ..., allocated_resources_status: _Optional[_Iterable[_Union[ResourceStatus, _Mapping]]] = ...) -> None: ...

class ResourceStatus(_message.Message):
    __slots__ = ("name", "resources")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    name: str
    resources: _containers.RepeatedCompositeFieldContainer[ResourceHealth]
    def __init__(self, name: _Optional[str] = ..., resources: _Optional[_Iterable[_Union[ResourceHealth, _Mapping]]] = ...) -> None: ...

class ResourceHealth(_message.Message):
    __slots__ = ("resource_id", "health")
    RESOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    resource_id: str
    health: str
    def __init__(self, resource_id: _Optional[str] = ..., health: _Optional[str] = ...) -> None: ...
