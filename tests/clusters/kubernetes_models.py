"""Check manifests against the models that the packages of Kubeflow publish: every field is known, has its type, and none is missing."""

from __future__ import annotations

import typing
from typing import Any

PYTORCH_JOB = "kubeflow.org/v1", "PyTorchJob"


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return one line for each field of a manifest that its model does not know or whose value it refuses.

    Raises:
        ImportError: The package with the model is not installed (kubeflow-trainer-api, kubeflow-training).
    """
    import kubeflow_trainer_api.models as models

    group, kind = manifest["apiVersion"], manifest["kind"]
    if (group, kind) == PYTORCH_JOB:
        return list(_pytorch_job(manifest))
    prefix = {"trainer.kubeflow.org/v1alpha1": "TrainerV1alpha1", "jobset.x-k8s.io/v1alpha2": "JobsetV1alpha2"}[group]
    return list(_fields(getattr(models, prefix + kind), manifest, kind))


def _fields(model: Any, value: Any, where: str) -> typing.Iterator[str]:
    """Yield the problems of ``value`` under a pydantic model, which by itself passes over fields that it does not know."""
    known = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    if "actual_instance" in known:  # a number or a text, such as the amount of a resource
        if not isinstance(value, (int, float, str)):
            yield f"{where}: a number or a text"
        return
    if not isinstance(value, dict):
        yield f"{where}: {value!r} is no mapping"
        return
    for name, inner in value.items():
        if name not in known:
            yield f"{where}.{name}: no such field; known: {', '.join(sorted(known))}"
            continue
        yield from _of_type(known[name], inner, f"{where}.{name}")
    for name, field in model.model_fields.items():
        if field.is_required() and (field.alias or name) not in value:
            yield f"{where}.{field.alias or name}: missing"


def _of_type(annotation: Any, value: Any, where: str) -> typing.Iterator[str]:
    origin, arguments = typing.get_origin(annotation), [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    if origin is typing.Union:
        yield from _of_type(arguments[0], value, where)
    elif origin is list:
        if not isinstance(value, list):
            yield f"{where}: {value!r} is no list"
            return
        for number, inner in enumerate(value):
            yield from _of_type(arguments[0], inner, f"{where}[{number}]")
    elif origin is dict:
        for name, inner in value.items():
            yield from _of_type(arguments[1], inner, f"{where}.{name}")
    elif hasattr(annotation, "model_fields"):
        yield from _fields(annotation, value, where)
    elif origin is typing.Annotated or typing.get_args(annotation):  # StrictStr, StrictInt, StrictBool
        yield from _of_type(arguments[0], value, where)
    elif isinstance(annotation, type) and annotation is not object and not isinstance(value, annotation):
        yield f"{where}: {value!r} is no {annotation.__name__}"


def _pytorch_job(manifest: dict[str, Any]) -> typing.Iterator[str]:
    import kubeflow.training as training
    import kubeflow_trainer_api.models as models

    spec = manifest["spec"]
    yield from _attributes(training.KubeflowOrgV1PyTorchJob, manifest, "PyTorchJob")
    yield from _attributes(training.KubeflowOrgV1PyTorchJobSpec, spec, "spec")
    yield from _attributes(training.KubeflowOrgV1RunPolicy, spec["runPolicy"], "spec.runPolicy")
    for name, replica in spec["pytorchReplicaSpecs"].items():
        if name not in ("Master", "Worker"):
            yield f"{name}: a replica is named Master or Worker"
        yield from _attributes(training.KubeflowOrgV1ReplicaSpec, replica, name)
        yield from _fields(models.IoK8sApiCoreV1PodTemplateSpec, replica["template"], f"{name}.template")


_SIMPLE = {"str": str, "int": int, "bool": bool}


def _attributes(model: Any, value: dict[str, Any], where: str) -> typing.Iterator[str]:
    """Yield the problems of the fields of ``value`` under a model of an OpenAPI generator; fields inside them are not looked at."""
    kinds = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
    for name, inner in value.items():
        if name not in kinds:
            yield f"{where}.{name}: no such field; known: {', '.join(sorted(kinds))}"
        elif not isinstance(inner, _SIMPLE.get(kinds[name], object)):
            yield f"{where}.{name}: {inner!r} is no {kinds[name]}"
