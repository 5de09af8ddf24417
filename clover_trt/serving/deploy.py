"""Kubernetes manifests of a served engine, and a KServe variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from clover_trt.config import Frozen
from clover_trt.errors import EngineError

PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002, "health": 8003, "openai": 8080}
Manifest = dict[str, Any]


class DeployOptions(Frozen):
    """What is deployed, and how large."""

    name: str = Field(default="clover", pattern=r"^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$")
    namespace: str = "default"
    image: str = Field(min_length=1)
    engine_claim: str = Field(min_length=1)  # PersistentVolumeClaim with the engine
    engine_path: str = "."  # of the engine in it
    architecture: str = Field(default="amd64", pattern="^(amd64|arm64)$")  # H200: amd64, GB300: arm64
    gpu_product: str | None = None  # node label nvidia.com/gpu.product
    slots: int = Field(default=8, ge=1)
    max_queue: int = Field(default=64, ge=0)
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=4, ge=1)
    queue_target: int = Field(default=4, ge=1)  # waiting requests a replica above which replicas are added
    memory: str = "64Gi"
    cpus: int = Field(default=8, ge=1)
    shared_memory: str = "2Gi"
    grace: int = Field(default=60, ge=0)  # seconds for running requests
    start_seconds: int = Field(default=1200, ge=30)  # that loading an engine may take
    api_keys_secret: str | None = None  # Secret with the key `keys`: an API key a line


def manifests(options: DeployOptions) -> dict[str, Manifest]:
    """Deployment, Service, HorizontalPodAutoscaler, PodDisruptionBudget and PodMonitor by file name."""
    o = options
    match = {"matchLabels": {"app.kubernetes.io/name": o.name}}
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    pod = {"metadata": {"labels": _labels(o)}, "spec": _pod(o, [_server(o), _front(o)])}
    scale_to = {"apiVersion": "apps/v1", "kind": "Deployment", "name": o.name}
    queue = {"metric": {"name": "clover_queue_length"}, "target": {"type": "AverageValue", "averageValue": str(o.queue_target)}}
    replicas = {"replicas": o.min_replicas, "selector": match, "strategy": rolling, "template": pod}
    slow = {"scaleDown": {"stabilizationWindowSeconds": 600}}
    service_ports = [{"name": name, "port": PORTS[name], "targetPort": name} for name in ("http", "grpc", "metrics", "openai")]
    return {
        "deployment.yaml": _object("apps/v1", "Deployment", o, replicas),
        "service.yaml": _object("v1", "Service", o, {"selector": match["matchLabels"], "ports": service_ports}),
        "autoscaler.yaml": _object(
            "autoscaling/v2", "HorizontalPodAutoscaler", o,
            {
                "scaleTargetRef": scale_to, "minReplicas": o.min_replicas, "maxReplicas": o.max_replicas,
                "metrics": [{"type": "Pods", "pods": queue}], "behavior": slow,
            },
        ),
        "disruption.yaml": _object("policy/v1", "PodDisruptionBudget", o, {"maxUnavailable": 1, "selector": match}),
        "podmonitor.yaml": _object(
            "monitoring.coreos.com/v1", "PodMonitor", o,
            {"selector": match, "podMetricsEndpoints": [{"port": "metrics", "interval": "10s"}]},
        ),
    }  # fmt: skip


def kserve_manifests(options: DeployOptions) -> dict[str, Manifest]:
    """An InferenceService of KServe in its plain deployment mode, with the same containers, and the PodMonitor."""
    o = options
    server = {**_server(o), "name": "kserve-container"}
    predictor = {**_pod(o, [server, _front(o)]), "minReplicas": o.min_replicas, "maxReplicas": o.max_replicas}
    service = _object("serving.kserve.io/v1beta1", "InferenceService", o, {"predictor": predictor})
    service["metadata"]["annotations"] = {"serving.kserve.io/deploymentMode": "RawDeployment"}
    monitor = manifests(o)["podmonitor.yaml"]
    monitor["spec"]["selector"] = {"matchLabels": {"serving.kserve.io/inferenceservice": o.name}}
    return {"inferenceservice.yaml": service, "podmonitor.yaml": monitor}


def write_manifests(folder: Path, options: DeployOptions, *, kserve: bool = False) -> list[Path]:
    """Write the manifests into a new or empty folder.

    Raises:
        EngineError: the folder has something in it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EngineError(f"{folder}: exists and is not an empty folder; choose another --out or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, manifest in (kserve_manifests if kserve else manifests)(options).items():
        path = folder / name
        path.write_text(yaml.safe_dump(manifest, sort_keys=False))
        written.append(path)
    return written


def _labels(o: DeployOptions) -> dict[str, str]:
    return {"app.kubernetes.io/name": o.name, "app.kubernetes.io/part-of": "clover-trt"}


def _object(version: str, kind: str, o: DeployOptions, spec: Manifest) -> Manifest:
    metadata = {"name": o.name, "namespace": o.namespace, "labels": _labels(o)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _pod(o: DeployOptions, containers: list[Manifest]) -> Manifest:
    selector = {"kubernetes.io/arch": o.architecture}
    if o.gpu_product is not None:
        selector["nvidia.com/gpu.product"] = o.gpu_product
    volumes: list[Manifest] = [
        {"name": "engine", "persistentVolumeClaim": {"claimName": o.engine_claim, "readOnly": True}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": o.shared_memory}},
        {"name": "scratch", "emptyDir": {}},
    ]
    if o.api_keys_secret is not None:
        volumes.append({"name": "api-keys", "secret": {"secretName": o.api_keys_secret}})
    return {
        "terminationGracePeriodSeconds": o.grace + 30,
        "nodeSelector": selector,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": containers,
        "volumes": volumes,
    }


LOCKED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
SCRATCH = {"name": "scratch", "mountPath": "/tmp"}


def _server(o: DeployOptions) -> Manifest:
    arguments = ["serve", "--engine", f"/engine/{o.engine_path}", "--host", "0.0.0.0"]
    arguments += ["--slots", str(o.slots), "--max-queue", str(o.max_queue), "--grace", str(o.grace)]

    def probe(path: str, **numbers: int) -> Manifest:
        return {"httpGet": {"path": path, "port": "health"}, **numbers}

    return {
        "name": "server",
        "image": o.image,
        "args": arguments,
        "ports": [{"name": name, "containerPort": PORTS[name]} for name in ("http", "grpc", "metrics", "health")],
        "startupProbe": probe("/ready", periodSeconds=10, failureThreshold=o.start_seconds // 10),
        "readinessProbe": probe("/ready", periodSeconds=2, failureThreshold=1),
        "livenessProbe": probe("/live", periodSeconds=10, failureThreshold=6),
        "resources": {
            "requests": {"cpu": str(o.cpus), "memory": o.memory},
            "limits": {"memory": o.memory, "nvidia.com/gpu": "1"},
        },
        "securityContext": LOCKED,
        "volumeMounts": [
            {"name": "engine", "mountPath": "/engine", "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            SCRATCH,
        ],
    }


def _front(o: DeployOptions) -> Manifest:
    arguments = ["openai", "--triton", "localhost:8001", "--host", "0.0.0.0"]
    mounts: list[Manifest] = [SCRATCH]
    if o.api_keys_secret is not None:
        arguments += ["--api-keys", "/keys/keys"]
        mounts.append({"name": "api-keys", "mountPath": "/keys", "readOnly": True})
    return {
        "name": "openai",
        "image": o.image,
        "args": arguments,
        "ports": [{"name": "openai", "containerPort": PORTS["openai"]}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "openai"}, "periodSeconds": 10, "timeoutSeconds": 9},
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": LOCKED,
        "volumeMounts": mounts,
    }
