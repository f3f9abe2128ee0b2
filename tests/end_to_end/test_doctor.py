"""`soloist doctor`: what it tells, what it hides, and that one broken part hides no other."""

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from soloist.cli import doctor, probes, verdict
from soloist.cli.machine import Card
from soloist.errors import CudaMissing, SettingError

H200 = Card("NVIDIA H200", (9, 0), 132, 227 * 1024, 141 * 10**9, 140 * 10**9, "0")


def no_driver():
    raise CudaMissing("the NVIDIA driver (libcuda)", "not there", "")


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Caches of this test, and no GPU."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("SOLOIST_CACHE", str(tmp_path / "kernels"))
    for module in (probes, verdict):
        monkeypatch.setattr(module, "read_cards", no_driver)


def test_a_machine_without_a_gpu(soloist):
    outcome = soloist("doctor")
    assert outcome.status == 0
    lines = dict(line.strip().split("  ", 1) for line in outcome.out.splitlines() if "  " in line)
    assert lines["reference"].strip() == "yes, on the CPU: fp32, bf16, fp16"
    assert lines["decode kernel"].strip().startswith("no: the NVIDIA driver (libcuda)")
    assert {"soloist", "python", "torch", "numpy", "httpx2", "jinja2", "CPU", "memory"} <= {*lines}
    assert "not installed" not in outcome.out
    assert "0 B in 0 kernels" in lines["kernels"]


def test_the_same_for_machines(soloist):
    told = json.loads(soloist("doctor", "--json").out)
    assert told["can_run"] is True
    assert set(told["probes"]) == set(probes.PROBES)
    assert told["probes"]["gpus"]["lines"] == {"GPUs": "none, without a driver"}
    assert told["runs"]["reference"].startswith("yes")


def test_broken_torch_is_told_beside_all_else(soloist, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = soloist("doctor")
    assert outcome.status == 1
    assert "torch" in outcome.out
    assert "not known: ModuleNotFoundError: import of torch halted" in outcome.out
    assert "no: ModuleNotFoundError" in outcome.out
    assert "kernels" in outcome.out  # later probes ran


def test_a_probe_that_hangs_is_given_up():
    forever = threading.Event()
    finding = doctor.look(forever.wait, limit_s=0.05)
    forever.set()
    assert finding.error == "no answer within 0.05 s"


def test_a_bad_setting_breaks_one_probe_only(soloist, monkeypatch):
    def refuse():
        raise SettingError("SOLOIST_CACHE", "relative", "an absolute path")

    monkeypatch.setattr(probes, "read_settings", refuse)
    told = json.loads(soloist("doctor", "--json").out)["probes"]
    assert "SOLOIST_CACHE is 'relative'" in told["kernels"]["error"]
    assert told["models"]["lines"]


def test_no_names_of_people_or_hosts(soloist, tmp_path, monkeypatch):
    home = tmp_path / "home" / "jane.doe"
    home.mkdir(parents=True)
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setattr("getpass.getuser", lambda: "jane.doe")
    monkeypatch.setattr("socket.gethostname", lambda: "box7.corp.example")
    monkeypatch.setenv("SOLOIST_CACHE", str(home / "kernels"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nfs/box7/jane.doe/hub")
    for outcome in (soloist("doctor"), soloist("doctor", "--json")):
        assert "~/kernels" in outcome.out
        assert "/nfs/HOST/USER/hub" in outcome.out
        for secret in ("jane", "box7", "corp.example", "hf_secret", str(tmp_path)):
            assert secret not in outcome.out


def test_common_names_and_parts_of_words_stay(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    monkeypatch.setattr("socket.gethostname", lambda: "torc")
    assert doctor.hider()("root torch torc") == "root torch HOST"


def test_what_gpus_run(monkeypatch):
    old = Card("Tesla T4", (7, 5), 40, 64 * 1024, 16 * 10**9, None, "1")
    monkeypatch.setattr(verdict, "read_cards", lambda: [H200, old])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(verdict, "nvrtc_version", lambda: (13, 0))
    lines = verdict.judge().lines
    assert lines["decode kernel, GPU 0"] == "yes: bf16, fp16"
    assert lines["decode kernel, GPU 1"].startswith("no: ")
    assert "7.5" in lines["decode kernel, GPU 1"]


def test_a_gpu_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(verdict, "read_cards", lambda: [H200])
    monkeypatch.setattr(verdict, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    line = verdict.judge().lines["decode kernel"]
    assert line.startswith("no: the driver shows a GPU, but torch")
    assert "pip install" in line


def test_gpus_that_work_together(monkeypatch):
    monkeypatch.setattr(probes, "read_cards", lambda: [H200] * 3)
    monkeypatch.setattr(probes, "can_access", lambda a, b: 2 not in (a, b))
    lines = probes.gpus()
    assert lines["GPU 0"].startswith("NVIDIA H200, 141 GB, 140 GB free, compute capability 9.0")
    assert lines["peer access"] == "GPUs 0, 1 reach each other's memory"
    assert lines["together"] == "up to 2 for one model (--gpus 2)"


def test_the_links_of_a_card(monkeypatch):
    class Missing(Exception):
        pass

    def state(_handle, link):
        if link == 2:
            raise Missing
        return 1

    library = SimpleNamespace(
        NVML_NVLINK_MAX_LINKS=18, NVMLError=Missing, nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1", nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda n: n, nvmlDeviceGetNvLinkState=state,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert probes.nvml() == {"NVIDIA driver": "580.1", "card 0": "2 NVLinks up"}
