"""The files of ``deploy/``: they are what their programs read, and what they say fits the server and each other.

There is no Docker and no cluster here. So compose.yaml and the manifests are compared with their published schemas, systemd
looks at the unit, and each command line goes through ``shmring serve`` itself. The steps of the Dockerfile are carried out in a
directory (slow). The server that they install is started, asked by the probes, and stopped, as Kubernetes does it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from dockerfile_parse import DockerfileParser
from jsonschema import validate

from shmring.door import parse_nbytes
from shmring.frontend.callers.keys import KEYS_VARIABLE
from shmring.frontend.commands import serve as serve_command
from shmring.frontend.commands.ray_options import settings_of_arguments
from shmring.frontend.processes import supervisor
from shmring.frontend.processes.memory_checks import needs_of
from shmring.frontend.processes.supervisor import ServeOptions
from shmring.service.option_table import Option
from tests.frontend.commands.test_option_places import accepted
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.31"  # whose schemas the manifests are compared with
LIMIT_S = 90.0

# Each instruction once, in order; those that only say something about the image are not carried out.
SAID = {"ARG", "FROM", "ENV", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "COMMENT", "ENTRYPOINT", "WORKDIR"}


@dataclasses.dataclass(frozen=True)
class Place:
    """How a file of ``deploy/`` runs the server.

    Attributes:
        options: that ``shmring serve`` makes of its command line and variables.
        shm_nbytes: size of /dev/shm; None: the machine's.
        memory_nbytes: limit of memory.
        stop_s: how long stopping may take before all is killed.
        ports: where others reach the server.
    """

    options: ServeOptions
    shm_nbytes: int | None
    memory_nbytes: int
    stop_s: float
    ports: set[int]


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def size(text: str) -> int:
    """A size as Docker, systemd and Kubernetes write it; all of ours are powers of two."""
    found = re.fullmatch(r"(\d+)([KMG])i?[Bb]?", text.upper().replace("I", "i"))
    assert found, text
    return int(found[1]) << {"K": 10, "M": 20, "G": 30}[found[2]]


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)s?", text)
    assert found, text
    return float(found[1])


# -- the Dockerfile --------------------------------------------------------------------------------------------------------


def dockerfile() -> DockerfileParser:
    return DockerfileParser(str(DEPLOY / "Dockerfile"), cache_content=True)


def instructions() -> list[tuple[str, str]]:
    return [(each["instruction"], each["value"]) for each in dockerfile().structure]


def value_of(instruction: str) -> str:
    [value] = [value for name, value in instructions() if name == instruction]
    return value


def image_variables() -> dict[str, str]:
    return {name: value for name, value in dockerfile().envs.items() if name.startswith("SHMRING_")}


# -- what each file says ---------------------------------------------------------------------------------------------------


def of_compose() -> Place:
    service = read("compose.yaml")["services"]["server"]
    environment = {**image_variables(), **service["environment"], "SHMRING_API_KEY": "key"}
    return Place(
        accepted(*service["command"], **environment),
        size(service["shm_size"]),
        size(service["mem_limit"]),
        seconds(service["stop_grace_period"]),
        {int(port.rpartition(":")[2]) for port in service["ports"]},
    )


def pod() -> Any:
    return read("kubernetes/deployment.yaml")["spec"]["template"]


def container() -> Any:
    [container] = pod()["spec"]["containers"]
    return container


def of_kubernetes() -> Place:
    [variable] = container()["env"]
    [shm] = [volume["emptyDir"] for volume in pod()["spec"]["volumes"] if volume["name"] == "shm"]
    assert shm["medium"] == "Memory"
    return Place(
        accepted(*container()["args"], **image_variables(), **{variable["name"]: "key"}),
        size(shm["sizeLimit"]),
        size(container()["resources"]["limits"]["memory"]),
        pod()["spec"]["terminationGracePeriodSeconds"],
        {port["containerPort"] for port in container()["ports"] if port["name"] != "health"},
    )


def unit() -> dict[str, str]:
    """The settings of the unit; none of them stands there twice."""
    lines = [line for line in (DEPLOY / "shmring.service").read_text().splitlines() if "=" in line and not line.startswith("#")]
    settings = dict(line.split("=", 1) for line in lines)
    assert len(settings) == len(lines)
    return settings


def of_systemd(tmp_path: Path) -> Place:
    arguments = shlex.split(unit()["ExecStart"])
    assert arguments[1:3] == ["serve", "--config"]
    (keys := tmp_path / "keys").write_text("key\n")
    keys.chmod(0o600)
    (config := tmp_path / "config.yaml").write_text(
        (DEPLOY / "config.yaml").read_text().replace("/etc/shmring/keys", str(keys))
    )
    options = accepted("--config", str(config))
    return Place(options, None, size(unit()["MemoryMax"]), seconds(unit()["TimeoutStopSec"]), {options.frontend.port})


def places(tmp_path: Path) -> Iterator[tuple[str, Place]]:
    yield "compose.yaml", of_compose()
    yield "deployment.yaml", of_kubernetes()
    yield "shmring.service", of_systemd(tmp_path)


# -- the tests -------------------------------------------------------------------------------------------------------------


def test_the_slab_fits_and_the_server_has_the_time_to_stop(tmp_path: Path) -> None:
    port = int(value_of("EXPOSE"))
    for name, place in places(tmp_path):
        slabs_nbytes = sum(parse_nbytes(engine.ring.slab_nbytes) for engine in place.options.engines)
        assert place.shm_nbytes is None or slabs_nbytes < place.shm_nbytes, name
        assert sum(place.options.memory_needs().values()) <= place.memory_nbytes, name
        grace_s = supervisor._FRONTENDS_GRACE_S + supervisor._ENGINES_GRACE_S
        running_s = place.options.frontend.shutdown_delay_s + place.options.frontend.shutdown_timeout_s
        stop_s = running_s + grace_s + slabs_nbytes / 2**30 * supervisor._FREEING_S_PER_GIB
        assert stop_s < place.stop_s <= stop_s + 30, name
        assert place.ports == {place.options.frontend.port} == {port}, name
        assert place.options.frontend.http.api_keys, f"{name}: nobody may call it without a key"


def test_the_page_on_memory_has_the_sums_of_the_doctor() -> None:
    page = " ".join((ROOT / "docs" / "operations.md").read_text().split())
    place, default_nbytes = of_kubernetes(), sum(accepted().memory_needs().values())
    of_place_nbytes = sum(place.options.memory_needs().values())
    assert f"For the defaults, that makes {default_nbytes / 2**30:.1f} GiB." in page
    assert f"Of the {place.memory_nbytes >> 30} GiB of `deployment.yaml`, that is {of_place_nbytes / 2**30:.1f}:" in page


def test_all_files_run_the_server_in_the_same_way(tmp_path: Path) -> None:
    """But for where it listens, and how it logs."""
    (_, first), *others = places(tmp_path)
    for name, other in others:
        assert other.options.engines[0].ring.slab_nbytes == first.options.engines[0].ring.slab_nbytes, name
        assert other.options.frontends == first.options.frontends, name
        assert other.options.frontend.shutdown_timeout_s == first.options.frontend.shutdown_timeout_s, name
        assert other.memory_nbytes == first.memory_nbytes, name


def test_every_option_and_variable_that_a_file_names_is_there() -> None:
    known = {text for option in serve_command.serve.params for text in option.opts}
    variables = {option.envvar for option in serve_command.serve.params if isinstance(option, Option)} | {KEYS_VARIABLE}
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    assert len(files) == 8
    of_others = {  # programs that the comments tell people to run
        *(
            "--build-arg",
            "--gpus",
            "--ulimit",
            "--build",
            "--system",
            "--home-dir",
            "--now",
            "--from-literal",
            "--help",
        ),
        *(
            "--yes",
            "--no-install-recommends",
            "--init",
            "--no-cache-dir",
            "--uid",
            "--create-home",
            "--from",
            "--interval",
            "--timeout",
            "--retries",
            "--start-period",
        ),
    }
    for path in files:
        text = path.read_text()
        assert not set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) - known - of_others, path
        assert not set(re.findall(r"\bSHMRING_[A-Z_]+", text)) - variables, path


def test_compose_is_as_its_specification_says() -> None:
    compose = read("compose.yaml")
    validate(compose, get_builtin_schema("vendor.compose-spec"))
    service = compose["services"]["server"]
    build = DEPLOY / service["build"]["context"]
    assert (build / service["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    named = {volume.split(":")[0] for volume in service["volumes"]}
    assert named == compose["volumes"].keys()


@for_each("name", ["deployment.yaml", "service.yaml"])
def test_manifests_are_as_kubernetes_says(name: str) -> None:
    kubernetes_validate.validate(read(f"kubernetes/{name}"), KUBERNETES, strict=True)


def in_ray() -> Any:
    return read("kubernetes/rayservice.yaml")["spec"]["rayClusterConfig"]


@for_each("group", ["head", "worker"])
def test_pods_of_ray_are_as_kubernetes_says(group: str) -> None:
    """KubeRay's own fields have no schema here; docs/clusters.md says with which version they were compared."""
    spec = in_ray()["headGroupSpec"] if group == "head" else in_ray()["workerGroupSpecs"][0]
    pod_spec = spec["template"]["spec"]
    deployment = read("kubernetes/deployment.yaml")
    labels = deployment["spec"]["template"]["metadata"]
    deployment["spec"]["template"] = {"metadata": labels, "spec": pod_spec}
    kubernetes_validate.validate(deployment, KUBERNETES, strict=True)
    [container] = pod_spec["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod_spec["volumes"]}


def test_a_worker_of_ray_has_room_for_a_replica_and_the_object_store() -> None:
    serving = yaml.safe_load(read("kubernetes/rayservice.yaml")["spec"]["serveConfigV2"])
    [application] = serving["applications"]
    settings = settings_of_arguments(application["args"], here=False)
    [group] = in_ray()["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == settings.deployment.num_replicas
    assert int(group["rayStartParams"]["num-cpus"]) == settings.deployment.num_cpus + 1, (
        "one replica fits a worker, and no second"
    )
    pod_spec = group["template"]["spec"]
    [container] = pod_spec["containers"]
    [volume] = pod_spec["volumes"]
    memory_nbytes = size(container["resources"]["limits"]["memory"])
    store_nbytes = int(group["rayStartParams"]["object-store-memory"])
    slab_nbytes = parse_nbytes(settings.engine.ring.slab_nbytes)
    assert volume["emptyDir"]["medium"] == "Memory"
    assert slab_nbytes + store_nbytes < size(volume["emptyDir"]["sizeLimit"])
    needs_nbytes = sum(needs_of([settings.engine], settings.http, 1).values())
    memory_of_ray_nbytes = 1 << 30  # its own processes on a node
    assert needs_nbytes + store_nbytes + memory_of_ray_nbytes < 0.95 * memory_nbytes, "from 95 % on, Ray kills workers"
    assert settings.engine.shutdown_timeout_s < pod_spec["terminationGracePeriodSeconds"]
    assert settings.http.request_timeout_s < serving["http_options"]["request_timeout_s"], "the frontend says what was too slow"
    [variable] = container["env"]
    assert variable["name"] == KEYS_VARIABLE, "nobody may call it without a key"
    assert serving["http_options"]["port"] == container["ports"][0]["containerPort"]
    assert application["import_path"] == "shmring.frontend.ray:app"


def test_a_wrong_field_is_noticed() -> None:
    deployment = read("kubernetes/deployment.yaml")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbes"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)


def test_manifests_mean_the_same_pods_and_port() -> None:
    labels = pod()["metadata"]["labels"]
    deployment, service, monitor = (read(f"kubernetes/{name}.yaml") for name in ("deployment", "service", "podmonitor"))
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert monitor["spec"]["selector"]["matchLabels"] == labels
    port, health_port = container()["ports"]
    asked = {kind: container()[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")}
    assert asked == {"startup": health_port["name"], "readiness": port["name"], "liveness": health_port["name"]}
    assert health_port["containerPort"] == of_kubernetes().options.health_port, "the supervisor's, who has time"
    used = {each["targetPort"] for each in service["spec"]["ports"]}
    assert used | {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} == {port["name"]}
    assert pod()["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    mounted = {mount["name"] for mount in container()["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod()["spec"]["volumes"]}


def probed_paths() -> set[str]:
    """What Docker, Kubernetes and Prometheus ask the server for."""
    paths = {container()[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    paths |= {each["path"] for each in read("kubernetes/podmonitor.yaml")["spec"]["podMetricsEndpoints"]}
    paths.add(pod()["metadata"]["annotations"]["prometheus.io/path"])
    return paths | set(re.findall(r"http://127\.0\.0\.1:8001(/\w+)", value_of("HEALTHCHECK")))


def test_the_probes_give_the_server_the_time_to_start() -> None:
    startup = container()["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > of_kubernetes().options.start_timeout_s
    assert startup["httpGet"]["path"] == container()["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container()["readinessProbe"]["httpGet"]["path"] == "/ready"
    start_s = re.search(r"--start-period=(\w+)", value_of("HEALTHCHECK"))
    assert start_s is not None
    assert seconds(start_s[1]) >= of_compose().options.start_timeout_s


def test_a_pod_goes_on_answering_until_its_readiness_probe_has_failed() -> None:
    probe = container()["readinessProbe"]
    failing_s = probe["failureThreshold"] * probe["periodSeconds"]
    assert (
        failing_s + 2 <= of_kubernetes().options.frontend.shutdown_delay_s
    )  # some time more, for the endpoints of the service


def test_nothing_runs_as_root_and_all_agree_who_runs() -> None:
    uid, gid = value_of("USER").split(":")
    context = pod()["spec"]["securityContext"]
    assert context["runAsNonRoot"]
    assert (context["runAsUser"], context["runAsGroup"]) == (int(uid), int(gid))
    [user] = [value for name, value in instructions() if name == "RUN" and value.startswith("useradd")]
    assert f"--uid {uid} " in user
    assert container()["securityContext"]["readOnlyRootFilesystem"]
    assert read("compose.yaml")["services"]["server"]["read_only"]
    assert (
        f"useradd --system --home-dir /var/lib/{unit()['StateDirectory']} {unit()['User']}"
        in (DEPLOY / "shmring.service").read_text()
    )


def test_both_install_what_traces_need() -> None:
    [installed] = [value for name, value in instructions() if name == "RUN" and "'.[" in value]
    extras = re.compile(r"'\.\[([a-z,]+)\]'")
    texts = [installed, (DEPLOY / "shmring.service").read_text()]
    assert [found for text in texts for found in extras.findall(text)] == ["serve,transformers,otel"] * 2


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here (Debian: apt install systemd)")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """It also looks for the program, so the unit gets one that is there."""
    path = tmp_path / "shmring.service"
    text = (DEPLOY / "shmring.service").read_text().replace(shlex.split(unit()["ExecStart"])[0], sys.executable)

    def verify(content: str) -> str:
        path.write_text(content)
        command = ["systemd-analyze", "verify", "--man=no", str(path)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        lines = [line for line in finished.stderr.splitlines() if path.name in line]
        return "\n".join(lines) or ("" if finished.returncode == 0 else finished.stderr)

    assert verify(text) == ""
    said = verify(text.replace("KillMode=mixed", "KillMode=mix").replace("LimitMEMLOCK", "LimitMEMLOK"))
    assert "Failed to parse kill mode" in said
    assert "LimitMEMLOK" in said


# -- the image, as far as there is one without Docker ------------------------------------------------------------------------


def carry_out(root: Path) -> None:
    """Does what the Dockerfile says, below a directory. Packages that are installed here count as installed there."""
    made = shutil.ignore_patterns("*.so", "compiled.pyi", "__pycache__", ".*_cache")
    directory = root
    for instruction, value in instructions():
        if instruction == "FROM":
            directory = root
        elif instruction == "WORKDIR":
            (directory := root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY" and value.startswith("--from=build "):
            _, source, target = value.split()
            assert source == target, "both stages lie in one directory here"
            assert (root / source.lstrip("/")).is_dir()
        elif instruction == "COPY":
            *sources, target = value.split()
            for source in sources:
                if (ROOT / source).is_dir():  # of a directory, Docker copies what is in it
                    shutil.copytree(ROOT / source, directory / target, symlinks=True, ignore=made)
                else:
                    shutil.copy(ROOT / source, directory / target)
        elif instruction == "RUN" and value.startswith(("apt-get ", "useradd ")):
            pass  # they would change this machine
        elif instruction == "RUN":
            command = value.replace("/opt/", f"{root}/opt/")
            environment = os.environ | {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "CFLAGS": "-O0 -fwrapv -w",  # in a fifth of the time
                "PIP_NO_INDEX": "1",
                "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this as: without
            }
            environment.pop("PYTHONPATH", None)
            finished = subprocess.run(
                ["sh", "-ec", command],
                cwd=directory,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert finished.returncode == 0, f"{command}\n{finished.stdout}"
            for packages in root.glob("opt/shmring/lib/python*/site-packages"):
                (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
                for old in packages.glob("setuptools*"):  # which Python brings, and an index would replace
                    shutil.rmtree(old)
        else:
            assert instruction in SAID, f"{instruction} is not carried out here"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("image")
    carry_out(root)
    return root


@dataclasses.dataclass
class Server:
    url: str
    health_url: str
    process: subprocess.Popen[bytes]


@pytest.fixture
def server(image: Path, socket_dir: Path) -> Iterator[Server]:
    """The server of the image, as Kubernetes starts it, but for its port and with a small slab."""
    *init, program, command = json.loads(value_of("ENTRYPOINT"))
    assert init == ["tini", "--"]
    assert any("tini" in value for name, value in instructions() if name == "RUN" and value.startswith("apt-get "))
    readable, writable = os.pipe()
    here = ["--port=0", "--health-port=0", "--host=127.0.0.1", "--slab-nbytes=64MiB", f"--socket-dir={socket_dir}"]
    here.append(f"--ready-fd={writable}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SHMRING_API"))}
    environment |= image_variables() | {"SHMRING_API_KEY": "key"}
    process = subprocess.Popen(
        [*(init if shutil.which("tini") else ()), image / "opt/shmring/bin" / program, command, *container()["args"], *here],
        cwd=socket_dir,
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=(writable,),
    )
    os.close(writable)
    with open(readable, "rb") as pipe:
        try:
            line = pipe.readline()  # ends when the server does; it has --start-timeout
            assert line, f"it ended with {process.wait()}"
            ready = json.loads(line)
            yield Server(ready["url"], ready["health_url"], process)
        finally:
            process.terminate()
            process.wait(LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_image_serves_answers_its_probes_and_stops_in_time(server: Server, image: Path) -> None:
    where = subprocess.run(
        [image / "opt/shmring/bin/python", "-P", "-c", "import shmring.frontend; print(shmring.frontend.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    ).stdout
    assert where.startswith(f"{image}/opt/shmring/lib/")
    for path in sorted(probed_paths()):
        assert httpx.get(f"{server.url}{path}", timeout=LIMIT_S).status_code == 200, path
    models = f"{server.url}/v1/models"
    assert httpx.get(models, timeout=LIMIT_S).status_code == 401
    assert httpx.get(models, headers={"authorization": "Bearer key"}, timeout=LIMIT_S).status_code == 200
    check = json.loads(value_of("HEALTHCHECK").partition("CMD ")[2])
    health = f"http://127.0.0.1:{image_variables()['SHMRING_HEALTH_PORT']}/health"
    assert sum(word.count(health) for word in check) == 1, "the supervisor's, who has time"
    command = [image / "opt/shmring/bin" / check[0], *(word.replace(health, server.health_url) for word in check[1:])]
    assert subprocess.run(command, check=False).returncode == 0
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(of_kubernetes().stop_s) == 0
    assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 1
