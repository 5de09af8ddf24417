"""Manifests against the Kubernetes schemas, and monitoring files against the metrics there are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from clover_trt.serving.deploy import DeployOptions, kserve_manifests, manifests
from clover_trt.serving.metrics import FAMILIES

BUILD = Path(__file__).parents[2] / "build"
FULL = DeployOptions(
    name="chat", namespace="llm", image="clover-trt:1", engine_claim="engines", engine_path="clover", architecture="arm64",
    gpu_product="NVIDIA-GB300", api_keys_secret="keys",
)  # fmt: skip
PLAIN = DeployOptions(image="clover-trt:1", engine_claim="engines")
SUFFIXES = {"HISTOGRAM": ("_bucket", "_sum", "_count"), "COUNTER": ("",), "GAUGE": ("",)}
METRICS = {family.name + suffix for family in FAMILIES for suffix in SUFFIXES[family.kind]}


@pytest.mark.parametrize("options", [FULL, PLAIN], ids=["full", "plain"])
def test_manifests_are_valid_for_kubernetes(options: DeployOptions) -> None:
    for name, manifest in manifests(options).items():
        if name != "podmonitor.yaml":  # a type of the Prometheus operator
            kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_a_wrong_manifest_is_found() -> None:
    broken = manifests(PLAIN)["deployment.yaml"]
    broken["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = "http"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


def names_of_ports(manifest: dict[str, Any]) -> set[str]:
    return {port["name"] for container in manifest["spec"]["template"]["spec"]["containers"] for port in container["ports"]}


def test_ports_probes_and_the_autoscaler_refer_to_what_there_is() -> None:
    found = manifests(FULL)
    deployment, ports = found["deployment.yaml"], names_of_ports(found["deployment.yaml"])
    assert {port["targetPort"] for port in found["service.yaml"]["spec"]["ports"]} <= ports
    assert {each["port"] for each in found["podmonitor.yaml"]["spec"]["podMetricsEndpoints"]} <= ports
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        probes = [container[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe") if kind in container]
        assert probes
        assert {probe["httpGet"]["port"] for probe in probes} <= {port["name"] for port in container["ports"]}
        volumes = {volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    (metric,) = found["autoscaler.yaml"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in METRICS
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert found["service.yaml"]["spec"]["selector"].items() <= labels.items()
    server = deployment["spec"]["template"]["spec"]["containers"][0]
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > int(server["args"][-1])


def test_the_pod_of_kserve_is_a_valid_pod() -> None:
    service = kserve_manifests(FULL)["inferenceservice.yaml"]
    predictor = dict(service["spec"]["predictor"])
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert (predictor.pop("minReplicas"), predictor.pop("maxReplicas")) == (1, 4)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": predictor}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_the_command_writes_files_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "clover_trt.cli", "deploy", "k8s", "--image", "i:1", "--engine-claim", "c", *options]
        return subprocess.run(command, capture_output=True, text=True)

    assert run("--out", str(tmp_path / "k"), "--gpu", "gb300").returncode == 0
    deployment = yaml.safe_load((tmp_path / "k" / "deployment.yaml").read_text())
    assert deployment["spec"]["template"]["spec"]["nodeSelector"]["kubernetes.io/arch"] == "arm64"
    for options, message in (
        (("--out", str(tmp_path / "k")), "not an empty folder"),
        (("--out", str(tmp_path / "x"), "--gpu", "a100"), "expected one of h200, gb300"),
        (("--out", str(tmp_path / "x"), "--name", "Not_A_Name"), "name: String should match"),
        (("--out", str(tmp_path / "x"), "--min-replicas", "9"), "more than --max-replicas"),
    ):
        done = run(*options)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "x").exists()


def test_dashboards_and_alerts_ask_for_metrics_there_are() -> None:
    dashboard = json.loads((BUILD / "monitoring" / "grafana-dashboard.json").read_text())
    alerts = yaml.safe_load((BUILD / "monitoring" / "alerts.yaml").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    used = {name for expression in asked for name in re.findall(r"clover_\w+", expression)}
    assert used <= METRICS
    shown = {name for name in METRICS if any(name.startswith(each) or each.startswith(name) for each in used)}
    assert {"clover_requests_total", "clover_queue_length", "clover_slots_busy", "clover_tpf_bucket"} <= shown


def test_compose_is_read_and_names_ports_of_the_server() -> None:
    compose = yaml.safe_load((BUILD / "docker" / "compose.yaml").read_text())
    assert set(compose["services"]) == {"clover", "openai"}
    assert compose["services"]["clover"]["command"][:2] == ["serve", "--engine"]
    dockerfile = (BUILD / "docker" / "Dockerfile").read_text()
    assert re.search(r'ENTRYPOINT \["clover-trt"\]', dockerfile)
