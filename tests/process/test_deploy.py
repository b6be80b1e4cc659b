"""Manifests are rendered by a current kustomize, checked against Kubernetes' schemas, and compared with the program:
its flags, ports, health services and libraries. No image is built and no cluster is used, because neither is
available here."""

import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import os
import pathlib
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request

import grpc
import pytest
import yaml

from certificates import Authority
from gateway import assert_keys_are_needed
from manifests import HTTP_ROUTE, judge, selectors, selects
from kvasir_process import BINARY, OPERATOR_PORTS, ROOT, TINY, KvasirProcess, run, wait_until
from pod_security import violations
from prometheus import free_port

sys.path.insert(0, str(ROOT / "deploy/metrics"))
import catalogue  # noqa: E402
import triton  # noqa: E402
from test_edge import Clients  # noqa: E402

DEPLOY = ROOT / "deploy"
KUSTOMIZE = DEPLOY / "kustomize"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
# The first version in which gRPC probes are stable, and the newest version that the validator knows.
KUBERNETES = ["1.27", "1.37"]
USER = 65532
# No overlay folder uses these components: each installation adds them to its own.
AUTOSCALED = "cpu and autoscaling"
WITH_TLS = "cpu and tls"
WITH_IDENTITIES = "cpu, tls and identities"
WITH_TLS_TO_WORKERS = "cpu and tls-workers"
SMG_WITH_TLS = "smg, tls-workers and tls-gateway"
GPU_BEHIND_SMG = "smg and GPUs of a runtime class"
GPUS_OF_NODES = "multi-node and GPUs of a runtime class"
NODES_WITH_TLS = "multi-node and tls"
OWN = {
    AUTOSCALED: ["cpu", "autoscaling"], WITH_TLS: ["cpu", "tls"], WITH_IDENTITIES: ["cpu", "tls", "identities"],
    GPU_BEHIND_SMG: ["smg", "gpu", "nvidia-runtime"], GPUS_OF_NODES: ["multi-node", "gpu", "nvidia-runtime"],
    NODES_WITH_TLS: ["multi-node", "tls"], WITH_TLS_TO_WORKERS: ["cpu", "tls-workers"],
    SMG_WITH_TLS: ["smg", "tls-workers", "tls-gateway"],
}
ENCRYPTED = [WITH_TLS, WITH_IDENTITIES, NODES_WITH_TLS]
# Routers and workers encrypt what they send each other.
ENCRYPTED_INSIDE = [*ENCRYPTED, WITH_TLS_TO_WORKERS, SMG_WITH_TLS]
ON_GPUS = ["overlays/single-gpu", "overlays/multi-gpu", GPU_BEHIND_SMG, GPUS_OF_NODES]
BEHIND_SMG = ["overlays/smg", GPU_BEHIND_SMG, SMG_WITH_TLS]
# In these overlays, a replica is a group of a LeaderWorkerSet: one leader pod and the pods of ranks.
GROUPED = ["overlays/multi-node", GPUS_OF_NODES, NODES_WITH_TLS]
OVERLAYS = ["overlays/cpu", "overlays/smg", "overlays/single-gpu", "overlays/multi-gpu", "overlays/multi-node", *OWN]
# Labels that the controller of a LeaderWorkerSet sets on its pods.
SET = "leaderworkerset.sigs.k8s.io/name"
GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
# The leaders and ranks of an installation.
GROUP = {"app.kubernetes.io/component": "group", "app.kubernetes.io/instance": "kvasir"}
# The ports that Linux chooses by itself (net.ipv4.ip_local_port_range). Collectives use them.
PICKED_PORTS = (32768, 60999)
SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}


@pytest.fixture(scope="session")
def kustomize():
    done = subprocess.run([ROOT / "scripts/setup_kustomize"], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"manifests are not rendered: no kustomize of Debian 13 here: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


@pytest.fixture(scope="session")
def build(kustomize, tmp_path_factory):
    """A function that renders an overlay, or one that it makes of an overlay and components: [overlay, component...]."""
    tree = tmp_path_factory.mktemp("tree") / "deploy"
    shutil.copytree(DEPLOY, tree)

    def render(overlay, colour=None, again=False, **more):
        if isinstance(overlay, str):
            folder = tree / "kustomize" / overlay
        else:
            base, *components = overlay
            overlays = tree / "kustomize/overlays"
            folder = overlays / "-".join(["of", *overlay, *([colour] if colour else [])])
            folder.mkdir(exist_ok=again)
            # A colour may be one of any overlay, in place of its own.
            own = yaml.safe_load((overlays / "blue-green" / colour / "kustomization.yaml").read_text()) if colour else {}
            own |= {"namespace": "kvasir", "resources": [f"../{base}"], "components": [f"../../components/{each}" for each in components]}
            (folder / "kustomization.yaml").write_text(yaml.dump(own | more))
        return subprocess.run([kustomize, "build", folder], capture_output=True, text=True, timeout=60)

    render.tree = tree
    return render


@pytest.fixture(scope="session")
def rendered(build):
    """The resources of every overlay: {overlay: [resource]}."""
    out = {}
    for overlay in OVERLAYS:
        done = build(OWN.get(overlay, overlay))
        assert done.returncode == 0, done.stderr
        out[overlay] = list(yaml.safe_load_all(done.stdout))
    return out


@pytest.fixture(scope="session")
def watched(build):
    """The resources of every overlay with components/monitoring."""
    out = {}
    for overlay in OVERLAYS:
        done = build([*OWN.get(overlay, [overlay.removeprefix("overlays/")]), "monitoring"])
        assert done.returncode == 0, done.stderr
        out[overlay] = list(yaml.safe_load_all(done.stdout))
    return out


def find(resources, kind, name):
    """The resource with this name. A generator may have added a hash to it."""
    found = [
        each for each in resources
        if each["kind"] == kind and re.fullmatch(rf"{name}(-[a-z0-9]{{10}})?", each["metadata"]["name"])
    ]
    assert len(found) == 1, (kind, name)
    return found[0]


def templates(resources):
    """The templates of pods: {name: template}. A group has one for its leader and one for its ranks."""
    found = {}
    for each in resources:
        if each["kind"] in ("Deployment", "StatefulSet"):
            found[each["metadata"]["name"]] = each["spec"]["template"]
        if each["kind"] == "LeaderWorkerSet":
            group = each["spec"]["leaderWorkerTemplate"]
            found[each["metadata"]["name"]] = group["leaderTemplate"]
            found["kvasir-rank"] = group["workerTemplate"]
    return found


def pods(resources):
    return {name: template["spec"] for name, template in templates(resources).items()}


def container(pod, name="kvasir"):
    return next(each for each in pod["containers"] if each["name"] == name)


def settings(resources, name):
    """The environment of a workload's kvasir. For a group's rank, it is that of the first rank after the leader."""
    own = container(pods(resources)[name])
    wanted = {}
    for source in own["envFrom"]:
        wanted |= find(resources, "ConfigMap", re.sub(r"-[a-z0-9]{10}$", "", source["configMapRef"]["name"]))["data"]
    for each in own.get("env", []):
        # The controller and the kubelet set these values for the first group.
        if "value" in each:
            value = each["value"].replace("$(LWS_LEADER_ADDRESS)", "kvasir-worker-0.kvasir-worker.kvasir")
        else:
            assert each["valueFrom"] == {"fieldRef": {"fieldPath": f"metadata.labels['{WORKER_INDEX}']"}}
            value = "1"
        assert "$" not in value
        wanted[each["name"]] = value
    return wanted


def ranks_of_a_pod(resources, name):
    if name == "kvasir-router":
        return 1
    wanted = settings(resources, name)
    return int(wanted.get("KVASIR_LOCAL_RANKS", wanted.get("KVASIR_TP", 1)))


# The fields that a LeaderWorkerSet may have (leaderworkerset.x-k8s.io/v1, 0.6 and later). No package has its schema.
GROUP_FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"replicas", "startupPolicy", "rolloutStrategy", "networkConfig", "leaderWorkerTemplate"},
    "spec.rolloutStrategy": {"type", "rollingUpdateConfiguration"},
    "spec.rolloutStrategy.rollingUpdateConfiguration": {"partition", "maxUnavailable", "maxSurge"},
    "spec.leaderWorkerTemplate": {"leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy"},
}
GROUP_VALUES = {
    "spec.startupPolicy": {"LeaderCreated", "LeaderReady"},
    "spec.rolloutStrategy.type": {"RollingUpdate"},
    "spec.leaderWorkerTemplate.restartPolicy": {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
}


def judge_group(resource):
    """Checks a LeaderWorkerSet against the fields above, and its pods against Kubernetes' schemas."""
    import kubernetes_validate

    def at(path):
        value = resource
        for name in filter(None, path.split(".")):
            value = value[name]
        return value

    assert resource["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    for path, fields in GROUP_FIELDS.items():
        assert at(path).keys() <= fields, path
    for path, values in GROUP_VALUES.items():
        assert at(path) in values, path
    for number in ("replicas", "leaderWorkerTemplate.size"):
        assert isinstance(at(f"spec.{number}"), int)
    for template in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"},
               "template": at(f"spec.leaderWorkerTemplate.{template}")}
        for version in KUBERNETES:
            kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_monitoring_component_needs_the_types_of_the_prometheus_operator(rendered, watched, overlay):
    groups = {each["apiVersion"].rpartition("/")[0] for each in rendered[overlay]}
    # A cluster has these without any operator. Groups of pods need the controller of LeaderWorkerSets.
    own = {"", "apps", "autoscaling", "networking.k8s.io", "policy"}
    assert groups <= own | ({"leaderworkerset.x-k8s.io"} if overlay in GROUPED else set())
    # The component only adds resources, and the same ones to every overlay.
    assert [each for each in watched[overlay] if each in rendered[overlay]] == rendered[overlay]
    added = [(each["kind"], each["metadata"]["name"]) for each in watched[overlay] if each not in rendered[overlay]]
    assert sorted(added) == [
        ("ConfigMap", "kvasir-dashboards"), ("PodMonitor", "kvasir-rank"), ("PodMonitor", "kvasir-router"),
        ("PodMonitor", "kvasir-worker"), ("PrometheusRule", "kvasir")]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_resource_of_the_deployment_is_valid_in_the_kubernetes_schemas(watched, overlay):
    import kubernetes_validate

    from cloudcoil.models.prometheus_operator import v1 as operator

    judged = 0
    for resource in watched[overlay]:
        if resource["apiVersion"].startswith("monitoring.coreos.com/"):
            model = getattr(operator, resource["kind"]).model_validate(resource)
            # The models drop fields that they do not know.
            assert model.model_dump(mode="json", by_alias=True, exclude_unset=True) == resource
        elif resource["kind"] == "LeaderWorkerSet":
            judge_group(resource)
        else:
            for version in KUBERNETES:
                kubernetes_validate.validate(resource, version, strict=True)
        judged += 1
    assert judged > 16


def test_a_misspelt_field_of_a_kubernetes_resource_is_refused(rendered):
    import kubernetes_validate

    resource = find(rendered["overlays/cpu"], "Deployment", "kvasir-router")
    resource = yaml.safe_load(yaml.dump(resource))
    container(resource["spec"]["template"]["spec"])["readinessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(resource, KUBERNETES[-1], strict=True)
    group = find(rendered["overlays/multi-node"], "LeaderWorkerSet", "kvasir-worker")
    for path, name in ((("spec",), "startPolicy"), (("spec", "leaderWorkerTemplate", "workerTemplate", "spec"), "nodeSelectr")):
        resource = yaml.safe_load(yaml.dump(group))
        part = resource
        for each in path:
            part = part[each]
        part[name] = {}
        with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
            judge_group(resource)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_environment_settings_of_pods_are_flags_of_the_program_with_valid_values(rendered, overlay, tmp_path):
    for name, pod in pods(rendered[overlay]).items():
        (command,) = container(pod)["args"]
        wanted = settings(rendered[overlay], name)
        known = set(re.findall(r"\(Env:(KVASIR_\w+)\)", run(command, "--help").stdout))
        # A rank shares the leader's map, which has settings that only the leader reads.
        leaders = {"KVASIR_LISTEN", "KVASIR_RANK_LISTEN", "KVASIR_TLS_CLIENT_CA", "KVASIR_TLS_CLIENT_NAMES"}
        assert set(wanted) - known <= (leaders if name == "kvasir-rank" else set())
        printed = run(command, "--print-config", env={**os.environ, **wanted}).stdout
        for variable in wanted.keys() & known:
            value = wanted[variable]
            flag = variable.removeprefix("KVASIR_").lower().replace("_", "-")
            (line,) = re.findall(rf"^{flag}=(.*)$", printed, re.MULTILINE)
            listed = re.findall(r'"([^"]*)"', line) or [line]
            assert listed == value.split(","), line
        # A Service called kvasir... would set variables with the same prefix.
        assert pod["enableServiceLinks"] is False


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_match_the_program_and_every_reference_to_a_port_exists(watched, overlay):
    resources = watched[overlay]
    ports = {
        name: {port["name"]: port["containerPort"] for each in pod["containers"] for port in each["ports"]}
        for name, pod in pods(resources).items()
    }
    flags = {"metrics": "--metrics-port", "health": "--health-port"}
    for name in ports:
        text = run(name.removeprefix("kvasir-"), "--help").stdout
        for port, flag in {**flags, **({"grpc": "--grpc-port"} if name == "kvasir-router" else {})}.items():
            assert f"{flag} INT:INT in [0 - 65535]={ports[name][port]} " in text, (name, port)
        # The process of the pod starts these ranks itself, and each has ports of its own.
        for rank in range(1, ranks_of_a_pod(resources, name)):
            assert re.search(rf"--rank-metrics-port INT:INT in \[0 - \d+\]={ports[name][f'metrics-{rank}'] - rank} ", text)
    wanted = settings(resources, "kvasir-worker")
    assert wanted["KVASIR_LISTEN"] == f"0.0.0.0:{ports['kvasir-worker']['worker']}"
    if overlay in GROUPED:
        assert wanted["KVASIR_RANK_LISTEN"] == f"0.0.0.0:{ports['kvasir-worker']['ranks']}"

    by_label = {
        template["metadata"]["labels"]["app.kubernetes.io/name"]: name for name, template in templates(resources).items()
    }
    selecting = {
        "Service": (lambda spec: spec["selector"], lambda spec: [p["targetPort"] for p in spec["ports"]]),
        "PodDisruptionBudget": (lambda spec: spec["selector"]["matchLabels"], lambda spec: []),
        "PodMonitor": (
            # It also names ports of ranks that a pod may lack; the next test compares them.
            lambda spec: spec["selector"]["matchLabels"], lambda spec: [spec["podMetricsEndpoints"][0]["port"]]),
        "NetworkPolicy": (
            lambda spec: spec["podSelector"]["matchLabels"],
            lambda spec: [p["port"] for rule in spec["ingress"] for p in rule["ports"]]),
    }
    seen = set()
    for resource in resources:
        if resource["kind"] not in selecting:
            continue
        labels, named = selecting[resource["kind"]]
        if "app.kubernetes.io/component" in labels(resource["spec"]):
            # These resources select leaders and ranks.
            assert overlay in GROUPED and GROUP.items() <= labels(resource["spec"]).items()
            assert resource["kind"] == "PodDisruptionBudget" or resource["metadata"]["name"].startswith("kvasir-group-")
            name = "kvasir-worker"
        else:
            wanted = labels(resource["spec"])["app.kubernetes.io/name"]
            if wanted == "kvasir-rank" and resource["kind"] == "PodMonitor" and overlay not in GROUPED:
                continue
            name = by_label[wanted]
            assert set(named(resource["spec"])) <= ports[name].keys(), resource["metadata"]
        seen.add((resource["kind"], name))
    # Only routers call workers. Ranks have neither a Service nor a budget besides their leader's.
    assert seen == {(kind, name) for kind in selecting for name in ports if name != "kvasir-rank"} | {
        (kind, "kvasir-rank") for kind in ("PodMonitor", "NetworkPolicy") if overlay in GROUPED}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_rank_is_scraped_with_the_name_of_its_replica(watched, overlay):
    resources = watched[overlay]
    policies = {each["metadata"]["name"]: each["spec"] for each in resources if each["kind"] == "NetworkPolicy"}
    for name in pods(resources).keys() - {"kvasir-router"}:
        scraped = find(resources, "PodMonitor", name)["spec"]["podMetricsEndpoints"]
        metrics = ["metrics", *(f"metrics-{rank}" for rank in range(1, ranks_of_a_pod(resources, name)))]
        # The first ranks of a pod have ports of these names, and up to eight are scraped.
        assert [each["port"] for each in scraped] == ["metrics", *(f"metrics-{rank}" for rank in range(1, 8))][:len(scraped)]
        assert len(scraped) == (1 if name == "kvasir-rank" else 8)
        own = [port["name"] for port in container(pods(resources)[name])["ports"]]
        assert [port for port in own if port.startswith("metrics")] == metrics
        (opened,) = [rule["ports"] for rule in policies[name]["ingress"] if "namespaceSelector" in rule["from"][0]]
        assert [port["port"] for port in opened] == metrics
        for each in scraped:
            (rule,) = each["relabelings"]
            assert rule["targetLabel"] == "replica"
            # In both cases the replica is the name of the first rank's pod.
            of_pods = [f"__meta_kubernetes_pod_label_{re.sub('[^a-z0-9]', '_', label)}" for label in (SET, GROUP_INDEX)]
            assert (rule["sourceLabels"], rule.get("separator")) == (
                (of_pods, "-") if name == "kvasir-rank" else (["__meta_kubernetes_pod_name"], None))


@pytest.mark.parametrize("overlay", GROUPED)
def test_a_group_of_ranks_has_one_pod_per_rank_and_restarts_as_a_whole(rendered, overlay):
    resources = rendered[overlay]
    group = find(resources, "LeaderWorkerSet", "kvasir-worker")["spec"]
    size = group["leaderWorkerTemplate"]["size"]
    leader, rank = settings(resources, "kvasir-worker"), settings(resources, "kvasir-rank")
    # The index of a pod is its rank, because each pod has one rank.
    assert (leader["KVASIR_TP"], leader["KVASIR_LOCAL_RANKS"]) == (str(size), "1")
    assert set(rank) - set(leader) == {"KVASIR_LEADER", "KVASIR_RANK"}
    assert {name: rank[name] for name in leader} == leader
    # A pod is ready when it has all ranks.
    assert group["startupPolicy"] == "LeaderCreated"
    assert group["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    # The StatefulSet of leaders and the Service of base/worker.yaml make this name.
    port = leader["KVASIR_RANK_LISTEN"].rsplit(":", 1)[1]
    assert rank["KVASIR_LEADER"] == f"kvasir-worker-0.kvasir-worker.kvasir:{port}"
    budget = find(resources, "PodDisruptionBudget", "kvasir-worker")["spec"]
    assert budget == {"maxUnavailable": 1, "selector": {"matchLabels": GROUP}}
    assert not [each for each in resources if each["kind"] == "StatefulSet"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_of_ranks_are_open_only_within_their_group(rendered, overlay):
    resources = rendered[overlay]
    policies = [each["spec"] for each in resources if each["kind"] == "NetworkPolicy"]
    opened = [{"port": 8200, "protocol": "TCP"},
              {"port": PICKED_PORTS[0], "endPort": PICKED_PORTS[1], "protocol": "TCP"}]
    groups = [each for each in policies if GROUP_INDEX in each["podSelector"]["matchLabels"]]
    replicas = find(resources, "LeaderWorkerSet", "kvasir-worker")["spec"]["replicas"] if overlay in GROUPED else 0
    assert [each["podSelector"]["matchLabels"] for each in groups] == [
        {**GROUP, GROUP_INDEX: str(index)} for index in range(replicas)]
    for each in groups:
        own = [{"podSelector": each["podSelector"]}]
        assert each["policyTypes"] == ["Ingress", "Egress"]
        assert each["ingress"] == [{"from": own, "ports": opened}]
        assert each["egress"] == [{"to": own, "ports": opened}]
    # No other policy opens them, by name or by number.
    for each in policies:
        for rule in [*each["ingress"], *each["egress"]]:
            ports = rule["ports"]
            assert each in groups or not [
                port for port in ports if port["port"] in ("ranks", 8200) or "endPort" in port]


def test_ranks_of_one_pod_have_one_gpu_each_and_shared_memory(rendered):
    resources = rendered["overlays/multi-gpu"]
    pod = pods(resources)["kvasir-worker"]
    ranks = ranks_of_a_pod(resources, "kvasir-worker")
    assert ranks == 2
    assert container(pod)["resources"]["limits"]["nvidia.com/gpu"] == str(ranks)
    (memory,) = [each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm"]
    assert memory["medium"] == "Memory" and memory["sizeLimit"] == "2Gi"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container(pod)["volumeMounts"]
    # By itself, NCCL would not choose loopback.
    assert settings(resources, "kvasir-worker")["KVASIR_RANK_INTERFACE"] == "lo"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_admin_ports_stay_within_the_pod_and_workers_admit_only_routers(rendered, overlay):
    policies = {each["metadata"]["name"]: each["spec"] for each in rendered[overlay] if each["kind"] == "NetworkPolicy"}
    for name in pods(rendered[overlay]):
        assert "KVASIR_ADMIN_HOST" not in settings(rendered[overlay], name)  # the default is loopback
    (rule,) = [r for r in policies["kvasir-worker"]["ingress"] if {"port": "worker"} in r["ports"]]
    assert rule["from"] == [{"podSelector": {"matchLabels": {
        "app.kubernetes.io/name": "kvasir-router", "app.kubernetes.io/instance": "kvasir"}}}]
    clients = policies["kvasir-router"]["ingress"][0]
    assert clients["ports"] == [{"port": "http" if overlay in BEHIND_SMG else "grpc"}]


def labels_of_pods(resources):
    """The labels of each pod that the resources make: [labels]."""
    found = []
    for each in resources:
        if each["kind"] in ("Deployment", "StatefulSet"):
            found.append(each["spec"]["template"]["metadata"]["labels"])
        if each["kind"] == "LeaderWorkerSet":
            for index in range(each["spec"]["replicas"]):
                own = {SET: each["metadata"]["name"], GROUP_INDEX: str(index)}
                found += [{**each["spec"]["leaderWorkerTemplate"][side]["metadata"]["labels"], **own}
                          for side in ("leaderTemplate", "workerTemplate")]
    return found


def selected(resource, resources):
    """How many of the pods each selector of a resource selects: {path: count}."""
    return {path: sum(selects(wanted, labels) for labels in labels_of_pods(resources)) for path, wanted in selectors(resource)}


def names_in(value, name):
    """All values of fields with this name, at any depth."""
    if isinstance(value, list):
        return [found for each in value for found in names_in(each, name)]
    if isinstance(value, dict):
        return [found for key, each in value.items() for found in ([each] if key == name else names_in(each, name))]
    return []


# The settings of an overlay for each way in which the model arrives.
SOURCES = {
    "model-claim": {"CLAIM": "weights"},
    "model-image": {"IMAGE": "registry.example/model@sha256:" + "0" * 64},
    "model-download": {
        "URL": "https://store.example/model.tar", "SHA256": "1" * 64, "SIZE": "150Gi",
        "ROUTER_URL": "https://store.example/tokenizer.tar", "ROUTER_SHA256": "2" * 64, "ROUTER_SIZE": "2Gi"},
}


def source_of(values):
    return [{"name": "kvasir-model-source", "literals": [f"{name}={value}" for name, value in values.items()]}]


@pytest.mark.parametrize("overlay", [["cpu"], ["smg"], ["multi-gpu"], ["multi-node"], ["cpu", "tls"]])
@pytest.mark.parametrize("component", SOURCES)
def test_the_model_arrives_in_every_pod_as_a_component_says(build, overlay, component):
    import kubernetes_validate

    values = SOURCES[component]
    done = build([*overlay, component], configMapGenerator=source_of(values))
    assert done.returncode == 0, done.stderr
    resources = list(yaml.safe_load_all(done.stdout))
    assert not [each for each in resources if each["kind"] == "PersistentVolumeClaim"]
    for each in resources:
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "kvasir"
        if each["kind"] == "LeaderWorkerSet":
            continue
        for version in KUBERNETES[component == "model-image":]:  # 1.27 has no volumes of images
            kubernetes_validate.validate(each, version, strict=True)
    for name, template in templates(resources).items():
        pod = template["spec"]
        assert violations(pod) == []
        (volume,) = [each for each in pod["volumes"] if each["name"] == "model"]
        assert {"name": "model", "mountPath": "/models", "readOnly": True} in container(pod)["volumeMounts"]
        assert settings(resources, name)["KVASIR_MODEL"] == "/models/model"
        if component == "model-claim":
            assert volume == {"name": "model", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}
        elif component == "model-image":
            assert volume == {"name": "model", "image": {"reference": values["IMAGE"], "pullPolicy": "IfNotPresent"}}
        else:
            prefix = "ROUTER_" if name == "kvasir-router" else ""
            claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
            assert claim == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": values[f"{prefix}SIZE"]}}}
            (download,) = pod["initContainers"]
            given = {}
            for each in download["env"]:
                source = each["valueFrom"]["configMapKeyRef"]
                (data,) = [each["data"] for each in resources if each["metadata"]["name"] == source["name"]]
                given[each["name"]] = data[source["key"]]
            assert given == {"URL": values[f"{prefix}URL"], "SHA256": values[f"{prefix}SHA256"]}
            # The volume belongs to the pod's group.
            assert pod["securityContext"]["fsGroup"] == USER
            (script,) = [each["configMap"]["name"] for each in pod["volumes"] if each["name"] == "download"]
            assert "download.sh" in find(resources, "ConfigMap", script[:-11])["data"]


@pytest.mark.parametrize("component", SOURCES)
def test_a_component_for_models_without_its_source_is_refused(build, component):
    done = build(["cpu", component], again=True)
    assert done.returncode != 0 and "kvasir-model-source" in done.stderr
    values = dict(SOURCES[component])
    values.pop("SIZE", None) or values.clear()
    done = build(["cpu", component], again=True, configMapGenerator=source_of({**values, "OTHER": "x"}))
    assert done.returncode != 0 and "kvasir-model-source" in done.stderr


def test_a_download_leaves_only_a_folder_with_the_right_checksum(tmp_path):
    store = tmp_path / "store"
    (store / "folder").mkdir(parents=True)
    (store / "folder/config.json").write_text("{}")
    subprocess.run(["tar", "-C", store / "folder", "-cf", store / "model.tar", "."], check=True)
    right = hashlib.sha256((store / "model.tar").read_bytes()).hexdigest()
    models = tmp_path / "models"
    models.mkdir()

    def download(url, checksum):
        return subprocess.run(
            ["/bin/sh", KUSTOMIZE / "components/model-download/download.sh"], capture_output=True, text=True, timeout=60,
            env={"PATH": "/usr/bin:/bin", "MODELS": str(models), "URL": url, "SHA256": checksum})

    for url, checksum in (((store / "none.tar").as_uri(), right), ((store / "model.tar").as_uri(), "0" * 64)):
        assert download(url, checksum).returncode != 0
        assert not (models / "model").exists()
    # Remains of an attempt that ended in the middle are no obstacle.
    (models / "unpacked").mkdir()
    done = download((store / "model.tar").as_uri(), right)
    assert done.returncode == 0, done.stderr
    assert [each.name for each in models.iterdir()] == ["model"]
    assert (models / "model/config.json").read_text() == "{}"
    # A restart of the pod's containers does not download again.
    assert download("file:///none", right).returncode == 0


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_two_installations_in_one_namespace_share_neither_pods_nor_resources(build, watched, overlay):
    stacks = {"kvasir": watched[overlay]}
    for colour in ("blue", "green"):
        done = build([*OWN.get(overlay, [overlay.removeprefix("overlays/")]), "monitors"], colour)
        assert done.returncode == 0, done.stderr
        stacks[colour] = list(yaml.safe_load_all(done.stdout))
    for name, own in stacks.items():
        counted = 0
        for resource in own:
            for path, count in selected(resource, own).items():
                counted += 1
                # Without groups, no pod is a rank.
                assert count or (resource["kind"] == "PodMonitor" and "rank" in resource["metadata"]["name"]), (resource, path)
            for other in stacks.keys() - {name}:
                assert not any(selected(resource, stacks[other]).values()), (resource["kind"], resource["metadata"])
        assert counted > 14
        have = {(each["kind"], each["metadata"]["name"]) for each in own}
        for other in stacks.keys() - {name}:
            assert not have & {(each["kind"], each["metadata"]["name"]) for each in stacks[other]}
        # Deleting one colour must not delete the namespace.
        assert (("Namespace", "kvasir") in have) == (name == "kvasir")
        # References follow the names.
        for kind, field in (("PersistentVolumeClaim", "claimName"), ("Service", "serviceName")):
            assert {(kind, found) for found in names_in(own, field)} <= have
        assert {("ConfigMap", found["name"]) for found in names_in(own, "configMapRef")} <= have
        assert {(found["kind"], found["name"]) for found in names_in(own, "scaleTargetRef")} <= have
        (router,) = [each["data"] for each in own if each["kind"] == "ConfigMap" and "KVASIR_WORKERS" in each["data"]]
        for address in router["KVASIR_WORKERS"].split(","):
            service = address.rpartition(":")[0].rpartition("/")[2].rpartition(".")[2]
            assert ("Service", service) in have, address


@pytest.mark.parametrize("kind,field", [
    ("Service", ("spec", "selector")), ("PodDisruptionBudget", ("spec", "selector", "matchLabels")),
    ("NetworkPolicy", ("spec", "podSelector", "matchLabels")), ("PodMonitor", ("spec", "selector", "matchLabels"))])
def test_a_selector_without_the_label_of_its_installation_is_found(build, watched, kind, field):
    resource = next(each for each in watched["overlays/cpu"] if each["kind"] == kind and each["metadata"]["name"] != "kvasir-rank")
    assert all(selected(resource, watched["overlays/cpu"]).values())
    resource = yaml.safe_load(yaml.dump(resource))
    part = resource
    for name in field:
        part = part[name]
    assert part.pop("app.kubernetes.io/instance") == "kvasir"
    blue = list(yaml.safe_load_all(build("overlays/blue-green/blue").stdout))
    assert any(selected(resource, blue).values())


def test_the_route_divides_clients_between_the_services_of_both_colours(build):
    (route,) = yaml.safe_load_all(build("overlays/blue-green/route").stdout)
    assert (route["apiVersion"], route["kind"]) == ("gateway.networking.k8s.io/v1", "HTTPRoute")
    judge(route["spec"], HTTP_ROUTE)
    for name, change in (("filter", []), ("backendRefs", [{"name": "kvasir-blue"}]), ("timeouts", {"request": "never"})):
        wrong = yaml.safe_load(yaml.dump(route["spec"]))
        wrong["rules"][0][name] = change
        with pytest.raises(ValueError):
            judge(wrong, HTTP_ROUTE)
    (rule,) = route["spec"]["rules"]
    # The control plane's paths (/workers) stay inside.
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    backends = rule["backendRefs"]
    assert sum(each["weight"] for each in backends) == 100
    for colour, backend in zip(("blue", "green"), backends, strict=True):
        resources = list(yaml.safe_load_all(build(f"overlays/blue-green/{colour}").stdout))
        assert backend["port"] in [port["port"] for port in find(resources, "Service", f"kvasir-{colour}")["spec"]["ports"]]
        assert backend["name"] == f"kvasir-{colour}"
        assert {each["metadata"]["namespace"] for each in resources} == {route["metadata"]["namespace"]}


def chosen(selector, labels):
    """True if a label selector with matchLabels and `In` selects these labels."""
    expressions = selector.get("matchExpressions", [])
    assert selector.keys() <= {"matchLabels", "matchExpressions"} and all(each["operator"] == "In" for each in expressions)
    return selects(selector.get("matchLabels", {}), labels) and all(labels.get(each["key"]) in each["values"] for each in expressions)


def admitted(policy, namespace, labels):
    """The named ports that a policy opens to a pod with these labels in this namespace: {port}."""
    named = {"kubernetes.io/metadata.name": namespace, **labels}  # a namespace may carry any label, too
    return {
        port["port"] for rule in policy["spec"]["ingress"] for source in rule["from"] for port in rule["ports"]
        if chosen(source.get("namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": "kvasir"}}), named)
        and chosen(source.get("podSelector", {}), labels)
    }


CLIENT = {"kvasir-client": "true"}
ADMITS = "/spec/ingress/0/from/0/namespaceSelector/matchExpressions/0/values/-"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_clients_in_listed_namespaces_and_prometheus_reach_a_router(build, rendered, overlay):
    policy = find(rendered[overlay], "NetworkPolicy", "kvasir-router")
    served = {"http" if overlay in BEHIND_SMG else "grpc"}
    scraped = {"metrics", *(["gateway-metrics"] if overlay in BEHIND_SMG else [])}
    worker = labels_of_pods(rendered[overlay])[-1]
    assert admitted(policy, "kvasir", CLIENT) == served
    assert admitted(policy, "kvasir", {}) == admitted(policy, "kvasir", worker) == set()
    for namespace in ("default", "chat", "kube-system"):
        assert admitted(policy, namespace, CLIENT) == set(), namespace
    assert admitted(policy, "monitoring", {}) == admitted(policy, "monitoring", CLIENT) == scraped
    # This is how an installation lists another namespace.
    assert ADMITS in (DEPLOY / "README.md").read_text()
    patch = {"target": {"kind": "NetworkPolicy", "name": "kvasir-router"},
             "patch": yaml.dump([{"op": "add", "path": ADMITS, "value": "chat"}])}
    done = build(OWN.get(overlay, [overlay.removeprefix("overlays/")]), again=True, patches=[patch])
    policy = find(list(yaml.safe_load_all(done.stdout)), "NetworkPolicy", "kvasir-router")
    assert admitted(policy, "chat", CLIENT) == admitted(policy, "kvasir", CLIENT) == served
    assert admitted(policy, "chat", {}) == admitted(policy, "default", CLIENT) == set()


@pytest.mark.parametrize("overlay", ["cpu", "smg", "multi-node"])
def test_the_dns_component_opens_only_ports_of_dns_and_not_for_workers(build, overlay):
    import kubernetes_validate

    done = build([overlay, "dns"])
    assert done.returncode == 0, done.stderr
    resources = list(yaml.safe_load_all(done.stdout))
    policy = find(resources, "NetworkPolicy", "kvasir-dns")
    for version in KUBERNETES:
        kubernetes_validate.validate(policy, version, strict=True)
    picked = {labels["app.kubernetes.io/name"] for labels in labels_of_pods(resources)
              if chosen(policy["spec"]["podSelector"], labels)}
    assert picked == {"kvasir-router", *(["kvasir-rank"] if overlay == "multi-node" else [])}
    assert policy["spec"]["policyTypes"] == ["Egress"]
    opened = [(rule["to"], {port["port"] for port in rule["ports"]}) for rule in policy["spec"]["egress"]]
    assert opened == [
        ([{"ipBlock": {"cidr": "169.254.20.10/32"}}], {53}),
        ([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}}], {5353})]


@pytest.fixture
def calls_of(tmp_path):
    """A function that runs a hook with a `sleep` and a `kvasir` that only print their arguments: [line]."""
    for name in ("sleep", "kvasir"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*"\n')
        (tmp_path / name).chmod(0o755)

    def run_it(hook, environment):
        done = subprocess.run(hook["exec"]["command"], env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment},
                              capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.splitlines()

    return run_it


def assert_pods_end_in(resources, seconds, calls_of):
    """Every pod has `seconds` to end, and finishes its drain well before."""
    for name, pod in pods(resources).items():
        wanted = settings(resources, name)
        assert pod["terminationGracePeriodSeconds"] == seconds
        assert wanted["KVASIR_DRAIN_TIMEOUT"] == f"{seconds}s"
        *sleeps, drain = calls_of(container(pod)["lifecycle"]["preStop"], wanted)
        assert sleeps == (["sleep 10"] if name == "kvasir-router" else [])
        assert drain == f"kvasir drain --deadline {seconds - 60}s"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_has_ten_minutes_for_answers_and_finishes_its_drain(rendered, overlay, calls_of):
    assert_pods_end_in(rendered[overlay], 600 + 60, calls_of)


@pytest.mark.parametrize("overlay", [["cpu"], ["multi-gpu"], ["multi-node"], ["smg"], ["smg", "tls-workers", "tls-gateway"]])
def test_drains_grace_periods_and_hooks_follow_one_setting(build, overlay, calls_of):
    plain, same = (build(each, again=True) for each in (overlay, [*overlay, "time-to-end"]))
    assert plain.returncode == 0 and same.stdout == plain.stdout, "the defaults agree with each other"
    own = {"name": "kvasir-time-to-end", "behavior": "merge", "literals": ["seconds=120"]}
    done = build([*overlay, "time-to-end"], again=True, configMapGenerator=[own])
    assert done.returncode == 0, done.stderr
    resources = list(yaml.safe_load_all(done.stdout))
    assert not [each for each in resources if "time-to-end" in each["metadata"]["name"]]
    assert_pods_end_in(resources, 120, calls_of)
    if overlay[0] != "smg":
        return
    gateway = container(pods(resources)["kvasir-router"], "gateway")
    (source,) = [each["valueFrom"]["configMapKeyRef"] for each in gateway["env"] if each["name"] == "TIME_TO_END"]
    (settings_of_router,) = [each["data"] for each in resources if each["metadata"]["name"] == source["name"]]
    environment = {"TIME_TO_END": settings_of_router[source["key"]]}
    text = json.dumps(gateway["lifecycle"]["preStop"])
    assert text.count("/127.0.0.1/8004)") == 1
    with socket.create_server(("127.0.0.1", 0)) as router:
        hook = json.loads(text.replace("/8004)", f"/{router.getsockname()[1]})"))
        # Longer than the router's sleep and drain.
        assert calls_of(hook, environment) == ["sleep 1"] * 75
    assert calls_of(hook, environment) == [], "the router has ended"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_routers_find_every_worker_by_the_name_of_its_headless_service(rendered, overlay):
    resources = rendered[overlay]
    workers = find(resources, "LeaderWorkerSet" if overlay in GROUPED else "StatefulSet", "kvasir-worker")["spec"]
    if overlay == AUTOSCALED:
        scaler = find(resources, "HorizontalPodAutoscaler", "kvasir-worker")["spec"]
        fixed = find(rendered["overlays/cpu"], "StatefulSet", "kvasir-worker")["spec"]
        assert scaler["minReplicas"] == fixed["replicas"]
        # Otherwise every `kubectl apply` would undo the scaler's number.
        assert "replicas" not in workers
    assert settings(resources, "kvasir-router")["KVASIR_WORKERS"] == "dns:///kvasir-worker:8100"
    service = find(resources, "Service", "kvasir-worker")["spec"]
    # A headless Service's name has an address for each pod, also while the pod drains.
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    if overlay in GROUPED:
        template = workers["leaderWorkerTemplate"]
        chosen, others = template["leaderTemplate"], template["workerTemplate"]
        # Ranks are no workers. Leaders are in the Service of the set's own name, unless networkConfig changes that.
        assert not service["selector"].items() <= others["metadata"]["labels"].items()
        assert "networkConfig" not in workers
    else:
        chosen = workers["template"]
        assert workers["serviceName"] == "kvasir-worker"
    assert service["selector"].items() <= chosen["metadata"]["labels"].items()
    # Without workers a router is alive, but not ready.
    router = container(pods(resources)["kvasir-router"])
    assert router["startupProbe"]["httpGet"] == router["livenessProbe"]["httpGet"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_passes_the_restricted_pod_security_standard(rendered, overlay):
    judged = 0
    for name, template in templates(rendered[overlay]).items():
        assert violations(template["spec"], template["metadata"].get("annotations")) == [], name
        judged += 1
    assert judged == (3 if overlay in GROUPED else 2)


def test_the_pod_that_fills_the_volume_passes_the_restricted_pod_security_standard():
    assert violations(yaml.safe_load((DEPLOY / "fill.yaml").read_text())["spec"]) == []


@pytest.mark.parametrize("path,value,named", [
    (("hostNetwork",), True, "hostNetwork"), (("hostPID",), True, "hostPID"), (("hostIPC",), True, "hostIPC"),
    (("volumes",), [{"name": "node", "hostPath": {"path": "/"}}], "volumes.node.hostPath"),
    (("volumes",), [{"name": "share", "nfs": {"server": "s", "path": "/"}}], "volumes.share.nfs"),
    (("securityContext", "sysctls"), [{"name": "kernel.msgmax", "value": "1"}], "sysctls.kernel.msgmax"),
    (("securityContext", "runAsUser"), 0, "runAsUser"),
    (("securityContext", "runAsNonRoot"), None, "containers.kvasir.runAsNonRoot"),
    (("securityContext", "seccompProfile"), {"type": "Unconfined"}, "seccompProfile"),
    (("securityContext", "seccompProfile"), None, "containers.kvasir.seccompProfile"),
    (("securityContext", "seLinuxOptions"), {"type": "spc_t"}, "seLinuxOptions"),
    (("securityContext", "appArmorProfile"), {"type": "Unconfined"}, "appArmorProfile"),
    (("securityContext", "windowsOptions"), {"hostProcess": True}, "hostProcess"),
    (("initContainers",), [{"name": "first"}], "initContainers.first.allowPrivilegeEscalation"),
    (("containers", 0, "securityContext", "privileged"), True, "containers.kvasir.privileged"),
    (("containers", 0, "securityContext", "procMount"), "Unmasked", "containers.kvasir.procMount"),
    (("containers", 0, "securityContext", "allowPrivilegeEscalation"), None, "containers.kvasir.allowPrivilegeEscalation"),
    (("containers", 0, "securityContext", "runAsUser"), 0, "containers.kvasir.runAsUser"),
    (("containers", 0, "securityContext", "capabilities"), {}, "containers.kvasir.capabilities.drop"),
    (("containers", 0, "securityContext", "capabilities", "add"), ["SYS_ADMIN"], "containers.kvasir.capabilities.add"),
    (("containers", 0, "ports", 0, "hostPort"), 8100, "containers.kvasir.hostPort"),
    (("containers", 0, "livenessProbe", "httpGet", "host"), "10.0.0.1", "containers.kvasir.host"),
])
def test_a_pod_outside_the_restricted_pod_security_standard_is_found(rendered, path, value, named):
    pod = yaml.safe_load(yaml.dump(pods(rendered["overlays/cpu"])["kvasir-worker"]))
    part = pod
    for each in path[:-1]:
        part = part[each]
    if value is None:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    assert named in violations(pod)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_container_runs_as_root_or_writes_its_root_file_system(rendered, overlay):
    assert find(rendered[overlay], "Namespace", "kvasir")["metadata"]["labels"][
        "pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod in pods(rendered[overlay]).items():
        assert pod["automountServiceAccountToken"] is False
        # The files of a secret belong to root and to this group.
        secrets = [each for each in pod["volumes"] if "secret" in each]
        group = {"fsGroup": USER} if secrets else {}
        assert pod["securityContext"] == {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"}, **group}
        # NVIDIA's hooks write to the root file system of containers with a GPU, possibly after it has become read-only.
        hooked = overlay in ON_GPUS and name != "kvasir-router"
        for each in pod["containers"]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": not hooked, "capabilities": {"drop": ["ALL"]}}
            assert each["resources"]["requests"]["memory"] and each["resources"]["limits"]["memory"]
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= each.keys()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_without_tls_set_it_explicitly_and_pods_with_tls_have_its_files(rendered, overlay):
    resources = rendered[overlay]
    for name, pod in pods(resources).items():
        wanted = settings(resources, name)
        files = {value for value in wanted.values() if value.startswith("/tls/")}
        secrets = [each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each]
        assert {each["secret"]["defaultMode"] for each in pod["volumes"] if "secret" in each} <= {0o440}
        grouped = ["kvasir-ranks"] * (overlay in GROUPED and name != "kvasir-router")
        if grouped:
            assert {"name": "ranks", "mountPath": "/ranks", "readOnly": True} in container(pod)["volumeMounts"]
            assert wanted["KVASIR_RANK_SECRET_FILE"] == "/ranks/secret"
        if overlay not in ENCRYPTED_INSIDE:
            assert (files, secrets) == (set(), grouped)
            continue
        assert files == {"/tls/tls.crt", "/tls/tls.key", "/tls/ca.crt"}
        asks = overlay == WITH_IDENTITIES and name == "kvasir-router"
        own = "kvasir-worker" if name == "kvasir-rank" else name
        https = overlay == SMG_WITH_TLS and name == "kvasir-router"
        assert sorted(secrets) == sorted(grouped + [f"{own}-tls"] + ["kvasir-identities"] * asks + ["kvasir-gateway-tls"] * https)
        assert ("KVASIR_RANK_TLS_CERT" in wanted) == bool(grouped)
        assert {"name": "tls", "mountPath": "/tls", "readOnly": True} in container(pod)["volumeMounts"]
        assert ("KVASIR_IDENTITIES" in wanted) == asks
        if asks:
            (mount,) = [each["mountPath"] for each in container(pod)["volumeMounts"] if each["name"] == "identities"]
            assert wanted["KVASIR_IDENTITIES"] == f"{mount}/identities.json"


def test_the_example_of_identities_is_accepted_by_a_router(tmp_path):
    authority = Authority(tmp_path)
    pair = authority.sign("router", "IP:127.0.0.1")
    authority.sign("chat", "DNS:chat.kvasir")
    flags = ["--tls-cert", pair, "--tls-key", pair, "--tls-client-ca", authority.ca]
    with KvasirProcess("serve", *flags, "--identities", KUSTOMIZE / "components/identities/identities.json") as server:
        own = (tmp_path / "chat.pem").read_bytes()
        credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes(), own, own)
        with grpc.secure_channel(server.grpc, credentials) as channel:
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=20)


# If a port with TLS still declares h2c, a gateway sends plain text to it.
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_declare_http2_without_tls_only_if_tls_is_off(rendered, overlay):
    spoken = {
        each["metadata"]["name"]: port.get("appProtocol")
        for each in rendered[overlay] if each["kind"] == "Service"
        for port in each["spec"]["ports"] if port["targetPort"] in ("grpc", "worker")
    }
    h2c = "kubernetes.io/h2c"
    # Behind smg no Service has the router's gRPC port.
    want = {} if overlay in BEHIND_SMG else dict.fromkeys(["kvasir", "kvasir-routers"], None if overlay in ENCRYPTED else h2c)
    want["kvasir-worker"] = None if overlay in ENCRYPTED_INSIDE else h2c
    assert spoken == want


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_prompts_leave_a_pod_in_plain_text_only_if_a_setting_says_insecure(rendered, overlay):
    for name in ("kvasir-router", "kvasir-worker"):
        wanted = settings(rendered[overlay], name)
        listens = name == "kvasir-worker" or wanted["KVASIR_HOST"] != "127.0.0.1"
        plain = (listens and "KVASIR_TLS_CERT" not in wanted) or (name == "kvasir-router" and "KVASIR_WORKER_TLS_CA" not in wanted)
        assert wanted["KVASIR_INSECURE"] == ("true" if plain else "false"), name
    if overlay in BEHIND_SMG:
        args = container(pods(rendered[overlay])["kvasir-router"], "gateway")["args"]
        ports = {each["name"]: each["containerPort"] for each in container(pods(rendered[overlay])["kvasir-router"], "gateway")["ports"]}
        assert args[args.index("--prometheus-host") + 1] == "0.0.0.0"
        assert args[args.index("--prometheus-port") + 1] == str(ports["gateway-metrics"])
        assert ("--tls-cert-path" in args) == ("--tls-key-path" in args) == (overlay == SMG_WITH_TLS)


@pytest.mark.parametrize("components", [["smg", "tls"], ["smg", "tls-gateway", "tls"], ["cpu", "tls-gateway"]])
def test_kustomize_refuses_components_that_would_send_plain_text(build, components):
    done = build(components)
    assert done.returncode != 0 and "/spec/" in done.stderr, done.stderr


def test_a_router_refuses_to_send_plain_text_out_of_a_pod_that_serves_https(build):
    done = build(["smg", "tls-gateway"])
    assert done.returncode == 0, done.stderr
    wanted = settings(list(yaml.safe_load_all(done.stdout)), "kvasir-router")
    refused = subprocess.run([BINARY, "router"], env={**os.environ, **wanted, "KVASIR_MODEL": str(TINY)},
                             capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0 and "--worker-tls-ca" in refused.stderr, refused.stderr


def test_a_gateway_with_tls_answers_only_over_https(rendered, smg, tmp_path):
    pair = Authority(tmp_path).sign("gateway", "IP:127.0.0.1")
    gateway = container(pods(rendered[SMG_WITH_TLS])["kvasir-router"], "gateway")
    assert all(gateway[f"{each}Probe"]["httpGet"]["scheme"] == "HTTPS" for each in ("startup", "readiness", "liveness"))
    assert {"name": "gateway-tls", "mountPath": "/tls", "readOnly": True} in gateway["volumeMounts"]
    with running_gateway(smg, gateway, tmp_path, {"/tls/tls.crt": str(pair), "/tls/tls.key": str(pair)}) as (address, *_):
        trusted = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        wait_until(lambda: status_of(f"https://{address}/liveness", trusted) == 200, "the gateway lives")
        assert status_of(f"https://{address}/workers", trusted) == 401
        assert status_of(f"http://{address}/liveness") is None


# The router and the worker require each other's names, as the settings of the manifests say.
def test_a_router_and_a_worker_with_the_tls_component_accept_each_other(rendered, tmp_path):
    authority = Authority(tmp_path, "ca")
    resources = rendered[WITH_TLS]
    router_names = settings(resources, "kvasir-worker")["KVASIR_TLS_CLIENT_NAMES"]
    worker_names = settings(resources, "kvasir-router")["KVASIR_WORKER_TLS_NAMES"]
    both = {
        "kvasir-router": authority.sign("router", f"DNS:{router_names}", "IP:127.0.0.1"),
        "kvasir-worker": authority.sign("worker", f"DNS:{worker_names}"),
    }

    def flags(name):
        own = {"/tls/tls.crt": both[name], "/tls/tls.key": both[name], "/tls/ca.crt": authority.ca}
        return [part for variable, value in settings(resources, name).items() if "_TLS_" in variable
                for part in ("--" + variable.removeprefix("KVASIR_").lower().replace("_", "-"), own.get(value, value))]

    with KvasirProcess("worker", "--listen", "127.0.0.1:0", *OPERATOR_PORTS, *flags("kvasir-worker"), ports=False) as worker, \
            KvasirProcess("router", "--workers", worker.grpc, *flags("kvasir-router")) as router:
        done = run("generate", "--endpoint", router.grpc, "--prompt", "Once", "--max-tokens", "2",
                   "--ca", authority.ca, "--cert", both["kvasir-router"], "--key", both["kvasir-router"])
        assert done.stdout.startswith("Once")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_pools_of_a_worker_fit_into_its_memory(rendered, overlay):
    size = lambda text: int(re.fullmatch(r"(\d+)(?:GiB|Gi)", text)[1])
    for name in pods(rendered[overlay]).keys() - {"kvasir-router"}:
        wanted = settings(rendered[overlay], name)
        limit = container(pods(rendered[overlay])[name])["resources"]["limits"]["memory"]
        # The pool of a GPU is in its own memory, after weights and scratch.
        assert ("KVASIR_KV_CACHE_BYTES" in wanted) == (overlay not in ON_GPUS)
        pools = sum(size(wanted[pool]) for pool in ("KVASIR_KV_CACHE_BYTES", "KVASIR_HOST_POOL_BYTES") if pool in wanted)
        # Each rank has pools of its own.
        assert pools * ranks_of_a_pod(rendered[overlay], name) <= size(limit) / 2, "weights and work need room, too"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_ranks_of_gpu_overlays_have_a_gpu(rendered, overlay):
    for name, pod in pods(rendered[overlay]).items():
        gpu = overlay in ON_GPUS and name != "kvasir-router"
        count = str(ranks_of_a_pod(rendered[overlay], name))
        for each in pod["containers"]:
            # Kubernetes accepts only whole GPUs, and requests that equal limits.
            for side in ("requests", "limits"):
                assert each["resources"][side].get("nvidia.com/gpu") == (count if gpu else None), (name, side)
        image = container(pod)["image"].rsplit("/", 1)[-1].split(":")[0]
        assert image == ("kvasir-cuda" if gpu else "kvasir"), name
        assert pod.get("nodeSelector") == ({"nvidia.com/gpu.present": "true"} if gpu else None), name
        tolerated = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}] if gpu else None
        assert pod.get("tolerations") == tolerated, name
        wanted = "nvidia" if gpu and "nvidia-runtime" in OWN.get(overlay, []) else None
        assert pod.get("runtimeClassName") == wanted, name
        # The device is named, because `auto` may choose the CPU if no GPU works.
        assert settings(rendered[overlay], name).get("KVASIR_DEVICE") == ("cuda" if gpu else None), name


# A surge would wait for ever for a GPU that only the end of the old pod frees.
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_rollout_ends_a_worker_before_it_starts_the_next(rendered, overlay):
    if overlay in GROUPED:
        strategy = find(rendered[overlay], "LeaderWorkerSet", "kvasir-worker")["spec"]["rolloutStrategy"]
        assert strategy["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 0}
        return
    worker = find(rendered[overlay], "StatefulSet", "kvasir-worker")
    assert worker["spec"]["updateStrategy"] == {"type": "RollingUpdate"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_startup_probe_leaves_enough_time_to_load_weights(rendered, overlay):
    for name in pods(rendered[overlay]).keys() - {"kvasir-router"}:
        probe = container(pods(rendered[overlay])[name])["startupProbe"]
        # This adds the time until the last pod of a group joins.
        (waits,) = re.findall(r"^(\d+)m$", settings(rendered[overlay], name).get("KVASIR_RANK_JOIN_TIMEOUT", "0m"))
        assert probe["periodSeconds"] * probe["failureThreshold"] >= (45 + int(waits)) * 60


def test_the_scaler_uses_metrics_that_the_adapter_has_and_workers_export(rendered):
    (rule,) = yaml.safe_load((DEPLOY / "prometheus/adapter.yml").read_text())["rules"]
    (given,) = re.findall(r'__name__=~"([^"]*)"', rule["seriesQuery"])
    scaler = find(rendered[AUTOSCALED], "HorizontalPodAutoscaler", "kvasir-worker")["spec"]
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]}
    assert asked == set(given.split("|"))
    assert asked <= catalogue.load().exported("worker")


def test_a_scaler_of_groups_scales_the_set_of_groups_and_every_group_has_its_policy(build, rendered):
    import kubernetes_validate

    done = build(["multi-node", "autoscaling-groups", "exclusive-topology"])
    assert done.returncode == 0, done.stderr
    resources = list(yaml.safe_load_all(done.stdout))
    scaler = find(resources, "HorizontalPodAutoscaler", "kvasir-worker")
    for version in KUBERNETES:
        kubernetes_validate.validate(scaler, version, strict=True)
    groups = find(resources, "LeaderWorkerSet", "kvasir-worker")
    assert scaler["spec"]["scaleTargetRef"] == {name: value for name, value in (
        ("apiVersion", groups["apiVersion"]), ("kind", groups["kind"]), ("name", groups["metadata"]["name"]))}
    # Except for its target, it is the scaler of single pods.
    single = find(rendered[AUTOSCALED], "HorizontalPodAutoscaler", "kvasir-worker")
    assert {**scaler["spec"], "scaleTargetRef": None} == {**single["spec"], "scaleTargetRef": None}
    assert "replicas" not in groups["spec"]
    policies = {each["spec"]["podSelector"]["matchLabels"].get(GROUP_INDEX): each["spec"]
                for each in resources if each["kind"] == "NetworkPolicy"}
    policies.pop(None)
    assert policies.keys() == set(map(str, range(scaler["spec"]["maxReplicas"])))
    # They differ only in the number of their group.
    texts = {json.dumps(spec, sort_keys=True).replace(f'{GROUP_INDEX}": "{index}"', "") for index, spec in policies.items()}
    assert len(texts) == 1
    assert groups["metadata"]["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "topology.kubernetes.io/rack"}


@pytest.mark.parametrize("components,lacks", [(["multi-node", "autoscaling"], "StatefulSet"), (["cpu", "autoscaling-groups"], "LeaderWorkerSet")])
def test_a_scaler_without_its_target_is_refused(build, components, lacks):
    done = build(components)
    assert done.returncode != 0 and lacks in done.stderr, done.stderr


def test_all_dashboards_are_in_the_config_map_that_grafana_loads(watched):
    config = find(watched["overlays/cpu"], "ConfigMap", "kvasir-dashboards")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config["data"] == {path.name: path.read_text() for path in (DEPLOY / "grafana").glob("*.json")}
    assert sum(map(len, config["data"].values())) < 1 << 20


def test_the_links_of_alerts_to_their_runbooks_follow_one_setting(build, watched):
    def links(resources):
        (rules,) = [each for each in resources if each["kind"] == "PrometheusRule"]
        return [rule["annotations"]["runbook_url"]
                for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule]

    plain = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"]
    pages = [rule["annotations"]["runbook"] for group in plain for rule in group["rules"] if "alert" in rule]
    assert links(watched["overlays/cpu"]) == [f"https://source.example/kvasir/{page}" for page in pages]
    setting = build.tree / "kustomize/components/monitoring/kustomization.yaml"
    text = setting.read_text()
    assert text.count("url=https://source.example/kvasir\n") == 1
    try:
        setting.write_text(text.replace("source.example/kvasir", "git.mine/docs/k/blob/main"))
        resources = list(yaml.safe_load_all(build(["single-gpu", "monitoring"], again=True).stdout))
    finally:
        setting.write_text(text)
    assert links(resources) == [f"https://git.mine/docs/k/blob/main/{page}" for page in pages]
    # The setting itself is not a resource of the cluster.
    assert not [each for each in resources if "runbooks" in each["metadata"]["name"]]


# A kubectl that records its calls, fails at the one that a test chooses, and knows which resources a selector leaves.
KUBECTL = """#!{python}
import json, os, subprocess, sys, yaml
args = sys.argv[1:]
with open(os.environ["CALLS"], "a+") as log:
    log.seek(0)
    turn = len(log.readlines())
    log.write(json.dumps(args) + "\\n")
if turn == int(os.environ["FAILS"]):
    sys.exit("this step fails")
if "get" in args:
    print({{"jsonpath={{.metadata.generation}}": 7, "jsonpath={{.spec.replicas}}": 2}}[args[args.index("-o") + 1]])
if "apply" in args:
    done = subprocess.run(["{kustomize}", "build", args[args.index("-k") + 1]], capture_output=True, check=True)
    name, value = args[args.index("-l") + 1].replace("!=", "=!").split("=")
    for each in yaml.safe_load_all(done.stdout):
        own = each["metadata"].get("labels", {{}}).get(name)
        if (own != value[1:]) if value[0] == "!" else (own == value):
            group = each["apiVersion"].rpartition("/")[0]
            print(each["kind"].lower() + ("." + group if group else "") + "/" + each["metadata"]["name"])
"""


@pytest.fixture
def roll(kustomize, tmp_path):
    """A function that runs deploy/roll over that kubectl: (its result, the calls)."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL.format(python=sys.executable, kustomize=kustomize))
    kubectl.chmod(0o755)

    def run_it(*args, fails=-1):
        calls = tmp_path / "calls"
        calls.write_text("")
        done = subprocess.run(
            [DEPLOY / "roll", *args], capture_output=True, text=True, timeout=60,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls), "FAILS": str(fails)})
        return done, [json.loads(line) for line in calls.read_text().splitlines()]

    return run_it


def steps(overlay):
    """The calls of a roll, and how many of them are done before routers change."""
    folder = str(KUSTOMIZE / overlay)
    apply = ["-n", "kvasir", "apply", "-k", folder, "-l"]
    routers = [[*apply, "app.kubernetes.io/name=kvasir-router", "-o", "name"],
               ["-n", "kvasir", "rollout", "status", "deployment.apps/kvasir-router", "--timeout=2h"]]
    if overlay in GROUPED:
        group = "leaderworkerset.leaderworkerset.x-k8s.io/kvasir-worker"
        waits = [["-n", "kvasir", "get", group, "-o", f"jsonpath={{{each}}}"] for each in (".metadata.generation", ".spec.replicas")]
        waits += [["-n", "kvasir", "wait", group, f"--for=jsonpath={{.status.{each}", "--timeout=2h"]
                  for each in ("observedGeneration}=7", "updatedReplicas}=2", "readyReplicas}=2")]
    else:
        waits = [["-n", "kvasir", "rollout", "status", "statefulset.apps/kvasir-worker", "--timeout=2h"]]
    return [[*apply, "app.kubernetes.io/name!=kvasir-router", "-o", "name"], *waits, *routers], 1 + len(waits)


@pytest.mark.parametrize("overlay", ["overlays/cpu", "overlays/smg", "overlays/multi-node"])
def test_a_roll_changes_routers_only_after_every_worker_is_ready(roll, rendered, overlay):
    calls, before = steps(overlay)
    done, made = roll(KUSTOMIZE / overlay)
    assert done.returncode == 0 and made == calls, done.stderr
    # Each resource is applied once.
    printed = re.findall(r"^[\w.-]+/(\S+)$", done.stdout, re.MULTILINE)
    assert sorted(printed) == sorted(each["metadata"]["name"] for each in rendered[overlay])
    (position,) = [match.start() for match in re.finditer(r"deploy/roll: routers", done.stdout)]
    # The Services of routers may be applied with them.
    assert re.findall(r"^[\w.-]+/\S+$", done.stdout[position:], re.MULTILINE) == [
        "service/kvasir", "service/kvasir-routers", "deployment.apps/kvasir-router"]
    # Nothing is done after a step that fails.
    for turn in range(len(calls)):
        done, made = roll(KUSTOMIZE / overlay, fails=turn)
        assert done.returncode != 0 and made == calls[:turn + 1]
        assert "deploy/roll: failed: " in done.stderr and "deploy/roll: done" not in done.stdout
        assert ("deploy/roll: routers" in done.stdout) == (turn >= before)


def test_a_roll_passes_its_namespace_and_time_on_and_refuses_what_it_does_not_know(roll):
    done, made = roll("--namespace", "chat", "--timeout", "5m", KUSTOMIZE / "overlays/cpu")
    assert done.returncode == 0 and len(made) == 4
    assert all(call[:2] == ["-n", "chat"] for call in made)
    assert [call[-1] for call in made if "rollout" in call] == ["--timeout=5m"] * 2
    for args, named in (([], "no folder"), (["--wait", "x"], "--wait"), (["a", "b"], "more than one folder: a, b"),
                        (["x", "--timeout"], "--timeout needs a value")):
        done, made = roll(*args)
        assert done.returncode == 2 and named in done.stderr and made == []
    done, made = roll("--help")
    assert done.returncode == 0 and made == [] and "--namespace NAME" in done.stdout and "set -e" not in done.stdout


def stage(name):
    """The lines of one stage of the container file, with continued lines joined."""
    stages = re.split(r"^FROM ", CONTAINERFILE.replace("\\\n", " "), flags=re.MULTILINE)[1:]
    return next(text for text in stages if text.splitlines()[0].endswith(f" AS {name}"))


def test_the_image_installs_exactly_the_libraries_that_the_program_links():
    needed = re.findall(r"NEEDED\)\s+Shared library: \[(.*)\]",
                        subprocess.run(["readelf", "-d", BINARY], capture_output=True, text=True, check=True).stdout)
    paths = dict(re.findall(r"^\s*(\S+) => (\S+) \(", subprocess.run(
        ["ldd", BINARY], capture_output=True, text=True, check=True).stdout, re.MULTILINE))
    # With a merged /usr, a package may list its files under either path. The loader itself belongs to libc6.
    names = {}
    for library in needed:
        path = pathlib.Path(paths.get(library, f"/lib64/{library}"))
        real = str(path.resolve())
        names[library] = {str(path), real, real.removeprefix("/usr")}
    owners = subprocess.run(
        ["dpkg-query", "-S", *sorted(set().union(*names.values()))], capture_output=True, text=True).stdout
    owner = {file: package for package, file in re.findall(r"^([^:,]+)(?::\w+)?: (\S+)$", owners, re.MULTILINE)}
    packages = set()
    for library, files in names.items():
        found = {owner[file] for file in files & owner.keys()}
        assert len(found) == 1, f"{library}: of the packages {found}"
        packages |= found
    (installed,) = re.findall(r"--no-install-recommends\s+(.*?)\s+&&", stage("runtime"))
    # Debian's images have libc6 already.
    assert set(installed.split()) == packages - {"libc6"}


def test_the_security_page_names_the_linked_version_of_grpc():
    linked = subprocess.run(["ldd", BINARY], capture_output=True, text=True, check=True).stdout
    version = re.search(r"libgrpc\+\+\.so\.([\d.]+) =>", linked)[1]
    (named,) = re.findall(r"packages gRPC (\S+) without", (ROOT / "SECURITY.md").read_text())
    assert named.startswith(version + ".")


def test_the_images_are_built_by_the_projects_own_scripts_and_run_as_the_pods_user():
    assert "RUN scripts/setup build" in stage("packages")
    for built in ("build", "build-cuda"):
        assert re.search(r"^RUN (.* && )?scripts/build kvasir && strip ", stage(built), re.MULTILINE)
        assert "packages AS" in stage(built).splitlines()[0]
    assert (ROOT / "scripts/build").exists()
    for final in ("kvasir", "cuda", "gateway"):
        assert re.findall(r"^USER (\S+)$", stage(final), re.MULTILINE) == [f"{USER}:{USER}"]
    for final, built in (("kvasir", "build"), ("cuda", "build-cuda")):
        assert stage(final).splitlines()[0] == f"runtime AS {final}"
        assert f"COPY --from={built} /src/build/release/kvasir /usr/local/bin/kvasir\n" in stage(final)
    assert 'ENTRYPOINT ["kvasir"]' in stage("runtime")
    exposed = re.findall(r"^EXPOSE (.*)$", stage("runtime"), re.MULTILINE)[0].split()
    assert exposed == ["8001", "8002", "8004", "8100"]
    # Without a target, the image for CPUs is built.
    assert re.findall(r"^FROM .* AS (\S+)$", CONTAINERFILE, re.MULTILINE)[-1] == "kvasir"


def test_the_image_for_gpus_builds_with_the_toolkit_and_fails_without_nvcc():
    (version,) = re.findall(r"^docker\.io/nvidia/cuda:(\d+\.\d+)\.\d+-devel-", stage("toolkit"), re.MULTILINE)
    assert version == "13.0"
    copied = f"/usr/local/cuda-{version}"
    assert f"COPY --from=toolkit {copied} {copied}\n" in stage("build-cuda")
    assert f"ENV PATH={copied}/bin:$PATH\n" in stage("build-cuda")
    assert "cmake --preset release -DKVASIR_CUDA=ON && " in stage("build-cuda")
    library = f"libcublasLt.so.{version.split('.')[0]}"
    assert f"RUN cp --dereference {copied}/lib64/{library} /{library}\n" in stage("toolkit")
    assert f"COPY --from=toolkit /{library} /usr/local/lib/{library}\n" in stage("cuda")
    assert "RUN cp --dereference /usr/lib/x86_64-linux-gnu/libnccl.so.2 /libnccl.so.2\n" in stage("toolkit")
    assert "COPY --from=toolkit /libnccl.so.2 /usr/local/lib/libnccl.so.2\nRUN ldconfig\n" in stage("cuda")
    # Otherwise every container of this image would get all GPUs of the host, even if it asks for none.
    assert "NVIDIA_VISIBLE_DEVICES" not in CONTAINERFILE


def test_the_health_check_of_the_image_asks_whether_the_server_is_ready():
    (command,) = re.findall(r"^HEALTHCHECK .*? CMD (\[.*\])$", stage("runtime"), re.MULTILINE)

    def healthy(address):
        environment = {**os.environ, "KVASIR_METRICS_PORT": address.rsplit(":", 1)[1]}
        return subprocess.run(json.loads(command), env=environment, timeout=30, stderr=subprocess.DEVNULL).returncode == 0

    with KvasirProcess("worker", "--listen", "127.0.0.1:0", *OPERATOR_PORTS, ports=False) as worker, \
            KvasirProcess("router", "--workers", worker.grpc) as router:
        assert healthy(worker.ready["metrics"]) and healthy(router.ready["metrics"])
        worker.process.kill()
        wait_until(lambda: not healthy(router.ready["metrics"]), "a router without a worker is not healthy")
        assert not healthy(worker.ready["metrics"])


def test_image_tags_equal_the_versions_of_the_program_and_the_gateway(rendered):
    version = run("--version").stdout.split()[-1]
    for pod in pods(rendered[GPU_BEHIND_SMG]).values():
        assert re.search(rf"/kvasir(-cuda)?:{re.escape(version)}$", container(pod)["image"])
    (gateway,) = re.findall(r"smg==(\S+)", stage("gateway"))
    pod = pods(rendered["overlays/smg"])["kvasir-router"]
    assert container(pod, "gateway")["image"].endswith(f"/kvasir-gateway:{gateway}")
    (labelled,) = re.findall(r'image\.version="(.*?)"', CONTAINERFILE)
    assert labelled == version


@pytest.fixture(scope="session")
def smg():
    """The gateway's program in the environment that scripts/setup_venv makes."""
    program = pathlib.Path(f"{sys.prefix}-smg/bin/smg")
    if not program.exists():
        pytest.skip(f"no gateway: {program} is missing")
    return program


@contextlib.contextmanager
def running_gateway(smg, gateway, tmp_path, files=()):
    """Runs the container's command line, with other `files` and without its router. Yields its address and keys."""
    ports = {each["name"]: str(each["containerPort"]) for each in gateway["ports"]}
    other = {port: str(free_port()) for port in ports.values()}
    assert len(ports) == 2 and other.keys() <= set(gateway["args"])
    args = [(other | dict(files)).get(each, each) for each in gateway["args"]]
    keys = {}
    for each in gateway["env"]:
        if secret := each.get("valueFrom", {}).get("secretKeyRef"):
            assert secret["name"] == "kvasir-gateway" and not secret.get("optional"), each
            keys[secret["key"]] = f"the-{secret['key']}-of-a-test"
            args = [arg.replace(f"$({each['name']})", keys[secret["key"]]) for arg in args]
    assert not any("$(" in arg for arg in args), args
    args = [each.replace(":8001", f":{free_port()}") for each in args]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([smg, *args], stdout=log, stderr=log, cwd=tmp_path)
    try:
        yield *(f"127.0.0.1:{other[ports[name]]}" for name in ("http", "gateway-metrics")), keys
    except BaseException:
        print((tmp_path / "log").read_text()[-2000:], file=sys.stderr)
        raise
    finally:
        process.kill()
        process.wait()


def test_the_gateway_of_a_pod_needs_keys_and_answers_its_probes(watched, smg, tmp_path):
    gateway = container(pods(watched["overlays/smg"])["kvasir-router"], "gateway")
    with running_gateway(smg, gateway, tmp_path) as (address, metrics, keys):
        url = f"http://{address}"
        wait_until(lambda: status_of(url + gateway["livenessProbe"]["httpGet"]["path"]) == 200, "the gateway lives")
        assert status_of(url + gateway["startupProbe"]["httpGet"]["path"]) == 200
        # Nothing listens at the router's port, so the gateway is alive but not ready.
        assert status_of(url + gateway["readinessProbe"]["httpGet"]["path"]) == 503
        assert_keys_are_needed(url, keys["tenant-key"], keys["control-plane-key"])
        # Prometheus needs no key. Its port has nothing else.
        scraped = [each["port"] for each in find(watched["overlays/smg"], "PodMonitor", "kvasir-router")["spec"]["podMetricsEndpoints"]]
        assert scraped == ["metrics", "gateway-metrics"]
        assert status_of(f"http://{metrics}/metrics") == 200
        assert status_of(f"http://{metrics}/workers") != 200 and status_of(f"http://{metrics}/v1/models") != 200


# Runs a command as a pod's container: the root file system has only the program and its libraries and is read-only, and
# the user has no privileges. The process may write to its own folder, as to a volume.
CONTAINED = """
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$(dirname "$root$1")"; touch "$root$1"; fi
  mount --rbind "$1" "$root$1"
  shift
done
shift
mount -o remount,bind,ro "$root"
if touch "$root/probe" 2>/dev/null; then echo "the root is not read-only" >&2; exit 9; fi
exec chroot "$root" /usr/bin/setpriv --reuid {user} --regid {user} --clear-groups --no-new-privs --bounding-set=-all \\
  --inh-caps=-all "$@"
"""


def libraries(program):
    output = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return re.findall(r"(/\S+) \(", output)


def contained(root, folders, *command):
    """The command line that runs `command` with `root` as its root file system, which gets `folders` and the
    program."""
    programs = [str(BINARY), "/usr/bin/setpriv", "/usr/bin/env"]
    files = sorted(set(programs).union(*(libraries(program) for program in programs)))
    return ["unshare", "--mount", "bash", "-euc", CONTAINED.format(user=USER), "contained", str(root),
            *map(str, folders), "/dev", "/proc", *files, "--", *map(str, command)]


class Contained(KvasirProcess):
    def __init__(self, command, environment, *flags, root, folders=()):
        super().__init__(command, *flags, model=None, ports=False)
        self.dir.chmod(0o777)
        root.mkdir()
        self.args = contained(
            root, [self.dir, TINY, *folders], "/usr/bin/env", "-i", *(f"{name}={value}" for name, value in environment.items()), *self.args)


def contained_runs(root):
    root.mkdir()
    done = subprocess.run(contained(root, [], BINARY, "--version"), capture_output=True, text=True)
    return done.returncode == 0, done.stderr.strip()


def runs_its_hook(process, pod, sleep="", forgotten=lambda: None):
    """Runs the preStop of a process's pod, with another sleep, to its end. Answers may take 15 s."""
    shell, option, command = container(pod)["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("/bin/sh", "-c") and command.endswith("s") and "exec kvasir drain --deadline " in command
    hook = subprocess.Popen(
        [shell, option, f"{re.sub(r'sleep [0-9]+', sleep, command)} --endpoint {process.admin}"], stdout=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{BINARY.parent}:{os.environ['PATH']}", "KVASIR_DRAIN_TIMEOUT": "75s"})
    forgotten()
    assert hook.wait(timeout=60) == 0


def passes(probe, served):
    """True if a probe of the kubelet passes. `served` has the address of each port."""
    if "httpGet" in probe:
        return status_of(f"http://{served[probe['httpGet']['port']]}{probe['httpGet']['path']}") == 200
    with grpc.insecure_channel(served[probe["grpc"]["port"]]) as channel:
        try:
            return channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10) == SERVING
        except grpc.RpcError:
            return False


def status_of(url, trusted=None):
    try:
        with urllib.request.urlopen(url, timeout=10, context=trusted) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return None


def test_workers_and_routers_run_as_in_their_pods_and_answer_their_probes(rendered, tmp_path):
    ok, why = contained_runs(tmp_path / "root")
    if not ok:
        pytest.skip(f"no read-only root or other user available here: {why}")
    resources = rendered["overlays/cpu"]
    # These settings of the test differ from a pod's: the model, addresses and memory.
    own = {
        "KVASIR_MODEL": TINY, "KVASIR_HOST": "127.0.0.1", "KVASIR_METRICS_PORT": 0,
        "KVASIR_ADMIN_PORT": 0, "KVASIR_HEALTH_PORT": 0, "KVASIR_KV_CACHE_BYTES": "64MiB", "KVASIR_HOST_POOL_BYTES": 0,
    }
    worker_settings = {**settings(resources, "kvasir-worker"), **own, "KVASIR_LISTEN": "127.0.0.1:0"}
    with Contained("worker", worker_settings, root=tmp_path / "worker") as worker:
        router_settings = {**settings(resources, "kvasir-router"), **own, "KVASIR_WORKERS": worker.grpc, "KVASIR_GRPC_PORT": 0}
        for pool in ("KVASIR_KV_CACHE_BYTES", "KVASIR_HOST_POOL_BYTES"):
            del router_settings[pool]
        with Contained("router", router_settings, root=tmp_path / "router") as router:
            served = {
                "kvasir-worker": {8004: worker.ready["health"], "metrics": worker.ready["metrics"]},
                "kvasir-router": {8004: router.ready["health"], "metrics": router.ready["metrics"]},
            }
            status = pathlib.Path(f"/proc/{worker.pid}/status").read_text()
            assert re.search(rf"^Uid:\s+{USER}\s", status, re.MULTILINE)
            assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
            seen = set(os.listdir(f"/proc/{worker.pid}/root"))
            assert not seen & {"etc", "var", "home", "root"}, seen
            for name, pod in pods(resources).items():
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    assert passes(container(pod)[probe], served[name]), (name, probe)
            # The preStop hooks run here without their sleep.
            for process, name in ((worker, "kvasir-worker"), (router, "kvasir-router")):
                runs_its_hook(process, pods(resources)[name], "sleep 0")
                assert process.process.wait(timeout=30) == 0
                if process is worker:
                    ready, live = (
                        container(pods(resources)["kvasir-router"])[probe] for probe in ("readinessProbe", "livenessProbe"))
                    wait_until(lambda: not passes(ready, served["kvasir-router"]), "not ready without a worker")
                    assert passes(live, served["kvasir-router"])


# The pods of a group run on one host, over its loopback.
@pytest.mark.parametrize("overlay", ["overlays/multi-node", NODES_WITH_TLS])
def test_a_leader_and_its_rank_run_as_in_their_pods_and_end_together(rendered, overlay, tmp_path):
    ok, why = contained_runs(tmp_path / "root")
    if not ok:
        pytest.skip(f"no read-only root or other user available here: {why}")
    resources = rendered[overlay]
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "secret").write_text("of this group alone\n".replace(" ", "-"))
    authority = Authority(secrets, "ca")
    # Leader and ranks show the same certificate. It has the name that each requires of the other.
    pair = authority.sign("worker", f"DNS:{settings(rendered[NODES_WITH_TLS], 'kvasir-rank')['KVASIR_RANK_TLS_NAMES']}")
    for folder, mode in ((tmp_path, 0o755), (secrets, 0o755), *((each, 0o644) for each in secrets.iterdir())):
        folder.chmod(mode)
    mounted = {"/ranks/secret": str(secrets / "secret"), "/tls/tls.crt": str(pair), "/tls/tls.key": str(pair),
               "/tls/ca.crt": str(authority.ca)}
    listen = f"127.0.0.1:{free_port()}"
    own = {
        "KVASIR_MODEL": TINY, "KVASIR_HOST": "127.0.0.1", "KVASIR_METRICS_PORT": 0, "KVASIR_ADMIN_PORT": 0,
        "KVASIR_HEALTH_PORT": 0, "KVASIR_KV_CACHE_BYTES": "64MiB", "KVASIR_HOST_POOL_BYTES": 0,
        "KVASIR_LISTEN": "127.0.0.1:0", "KVASIR_RANK_LISTEN": listen, "KVASIR_RANK_INTERFACE": "lo",
    }

    def started(name, root, **more):
        wanted = {variable: mounted.get(value, value) for variable, value in settings(resources, name).items()}
        (command,) = container(pods(resources)[name])["args"]
        return Contained(command, {**wanted, **own, **more}, root=root, folders=[secrets])

    leader = started("kvasir-worker", tmp_path / "leader")
    rank = started("kvasir-rank", tmp_path / "rank", KVASIR_LEADER=listen)
    try:
        # Neither is ready before both run.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(Contained.start, (leader, rank)))
        for process, name in ((leader, "kvasir-worker"), (rank, "kvasir-rank")):
            served = {8004: process.ready["health"], "metrics": process.ready["metrics"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert passes(container(pods(resources)[name])[probe], served), (name, probe)
        ranks = [(each["rank"], each["metrics"]) for each in leader.ready["ranks"]]
        assert ranks == [(0, leader.ready["metrics"]), (1, rank.ready["metrics"])]
        # This is the preStop hook of a rank.
        runs_its_hook(rank, pods(resources)["kvasir-rank"])
        assert [process.process.wait(timeout=30) for process in (rank, leader)] == [0, 0]
    finally:
        for process in (leader, rank):
            process.__exit__()


class Service:
    """One address for several targets, like a Service of kube-proxy. A new connection goes to the next target that was
    not forgotten; open connections stay."""

    def __init__(self, *targets):
        self.targets = list(targets)
        self.turn = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.turn += 1
            host, port = self.targets[self.turn % len(self.targets)].rsplit(":", 1)
            server = socket.create_connection((host, int(port)))
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source, sink):
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def forget(self, target):
        self.targets.remove(target)

    def close(self):
        # A closed socket stays alive while a thread is in accept() on it.
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class Streams:
    """Threads that stream one answer after the other, each on a connection of its own."""

    def __init__(self, target, model, count=4):
        self.whole, self.failed = 0, []
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self._ask, args=(target, model)) for _ in range(count)]

    def _ask(self, target, model):
        while not self.stopped.is_set():
            try:
                _, reason, tokens = triton.generate(target, model, "Once", max_tokens=40, ignore_eos=True)
                assert (reason, tokens) == ("length", 40)
                self.whole += 1
            except Exception as error:  # any failure is one that a client saw
                self.failed.append(error)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        wait_until(lambda: self.whole > len(self.threads), "whole streams")
        return self

    def __exit__(self, *unused):
        self.stopped.set()
        for thread in self.threads:
            thread.join()


def ends_with_its_pod(process, pod, forgotten=lambda: None):
    """Does what a kubelet does: preStop while the Service forgets the pod, then SIGTERM if the process still runs."""
    # The sleep is shorter, because this Service forgets faster.
    runs_its_hook(process, pod, "sleep 2", forgotten)
    if process.process.poll() is None:
        process.process.terminate()
    assert process.process.wait(timeout=60) == 0
    assert "aborted=0" in process.log()


# This is a rolling update: no client loses a request, not even a stream.
def test_no_request_fails_while_a_router_and_a_worker_end_as_their_pods_do(rendered):
    ends = pods(rendered["overlays/cpu"])
    flags = ["--drain-timeout", "15s", "--max-connection-age", "2s"]
    with tempfile.TemporaryDirectory() as folder:
        names = [f"unix:{pathlib.Path(folder) / f'{i}.sock'}" for i in range(2)]
        workers = [KvasirProcess("worker", "--listen", name, *OPERATOR_PORTS, "--drain-timeout", "15s", ports=False)
                   for name in names]
        routers = [KvasirProcess("router", "--workers", *names, *flags) for _ in range(2)]
        with workers[0], workers[1], routers[0], routers[1]:
            service = Service(*(router.grpc for router in routers))
            model = routers[0].ready["model"]
            with Clients([service.address], model) as clients, Streams(service.address, model) as streams:

                def answered(by, what):
                    unary, whole = clients.codes["OK"], streams.whole
                    wait_until(lambda: clients.codes["OK"] > unary + 48 and streams.whole > whole + 8, what)
                    assert by.metric("kvasir_router_output_tokens_total") > 0

                ends_with_its_pod(routers[0], ends["kvasir-router"], lambda: service.forget(routers[0].grpc))
                answered(routers[1], "answers of the router that stays")
                ends_with_its_pod(workers[0], ends["kvasir-worker"])
                answered(routers[1], "answers of the worker that stays")
            service.close()
            assert set(clients.codes) == {"OK"}, clients.codes
            assert streams.failed == []
