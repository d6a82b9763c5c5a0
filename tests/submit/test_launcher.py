"""The choice of a launcher: by name, and by the records in a run folder."""

from batchinfer.checked_json import publish_json
from batchinfer.rundir import LAUNCHERS, RunDir
from batchinfer.submit.k8s.launcher import KubernetesLauncher
from batchinfer.submit.launcher import last_launcher, launcher_named, launchers_of
from batchinfer.submit.ray.launcher import RayLauncher
from batchinfer.submit.slurm.launcher import SlurmLauncher

CLASSES = {"slurm": SlurmLauncher, "k8s": KubernetesLauncher, "ray": RayLauncher}


def test_every_name_has_its_launcher():
    assert {name: type(launcher_named(name)) for name in LAUNCHERS} == CLASSES


def test_the_latest_record_chooses_the_launcher(tmp_path):
    assert (last_launcher(RunDir(tmp_path)), launchers_of(RunDir(tmp_path))) == (None, [])
    for name, submitted_s in (("ray", 2.0), ("slurm", 3.0), ("k8s", 1.0)):
        (tmp_path / name).mkdir()
        publish_json(tmp_path / name / "0000.json", {"submitted_s": submitted_s})
    assert type(last_launcher(RunDir(tmp_path))) is SlurmLauncher
    assert [type(launcher) for launcher in launchers_of(RunDir(tmp_path))] == list(CLASSES.values())
