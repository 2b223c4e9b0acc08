"""A real Slurm of two nodes on this machine, with daemons, keys, ports and folders of its own.

Nothing in /etc, /var or /run is touched, so several clusters live side by side. Clients find one by ``SLURM_CONF``, and
whatever a cluster started carries that variable in its environment: that is how everything is found and ended, jobs
and orphaned daemons included. ``python cluster.py --guard FOLDER`` does so when its standard input ends, that is, when
whoever started the cluster is gone, however it went.
"""

import os
import platform
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

PACKAGES = "apt-get install slurm-wlm munge (tests/slurm/install.sh does so)"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/local/sbin"])

CONFIGURATION = """\
ClusterName=fvctest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job may start again when its old credential has expired: two minutes, if nothing is said.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
ReturnToService=2
SwitchType=switch/none
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/{tracking}
TaskPlugin=task/{task}
JobAcctGatherType=jobacct_gather/{gather}
JobAcctGatherFrequency=task=1
{gather_parameters}
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_min_age_reserve=0,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
SlurmctldTimeout=30
SlurmdTimeout=300
InactiveLimit=0
KillWait=10
MinJobAge=3600
CompleteWait=0
NodeName=n[{first}-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=6000
PartitionName=main Nodes=ALL Default=YES DefaultTime=00:10:00 MaxTime=01:00:00 PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=scavenge Nodes=ALL DefaultTime=00:10:00 MaxTime=01:00:00 PriorityTier=1 GraceTime=10 State=UP
"""
CONTROL_GROUPS = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
"""


def missing_programs() -> list[str]:
    """Which of Slurm's programs this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]


class ClusterError(RuntimeError):
    """The cluster, or a command to it, did not do what was wanted; the message holds what it said."""


class Cluster:
    """Two ``nodes`` of two CPUs and 6000 MiB each, in a folder of their own.

    A node's name holds its port, because it is also the name of its control groups, which all clusters here share.

    Partition ``main`` preempts jobs of partition ``scavenge``, which get their ``--signal`` ten seconds before.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        # Slurm sets memory limits by control groups of version 1 that it may write.
        groups = [Path("/sys/fs/cgroup") / file for file in ("memory/memory.limit_in_bytes", "freezer/tasks")]
        self.limits_memory = all(os.access(file, os.W_OK) for file in groups)
        self.nodes: tuple[str, ...] = ()
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """A client's, without what a surrounding job or a user's defaults would change."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN", "SQUEUE"))}
        return {**kept, "PATH": SEARCH, "SLURM_CONF": str(self.configuration)}

    def start(self) -> None:
        """Start everything and wait for two idle nodes.

        Raises:
            ClusterError: it did not come up; with the ends of the logs.
        """
        self._write_configuration()
        guard = [sys.executable, str(Path(__file__).resolve()), "--guard", str(self.folder)]
        own = {k: v for k, v in os.environ.items() if k != "SLURM_CONF"}
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, env=own, start_new_session=True)
        f = self.folder
        self.run(
            "munged", "--force", f"--key-file={f}/munge.key", f"--socket={f}/munge.socket", f"--pid-file={f}/munge.pid",
            f"--log-file={f}/log/munged.log", f"--seed-file={f}/munge.seed",
        )  # fmt: skip
        self.run("slurmctld")
        for node in self.nodes:
            self.boot(node)
        self.wait_for(lambda: self.run("sinfo", "-hN", "-p", "main", "-o", "%t").split() == ["idle"] * 2, "idle nodes")

    def boot(self, node: str) -> None:
        """Start a node's daemon."""
        self.run("slurmd", "-N", node)

    def processes_on(self, node: str) -> list[psutil.Process]:
        """A node's daemon, and all that its jobs have running."""
        marks = (f"spool.{node}", f"slurmd.{node}.log")
        found = []
        for process in _processes_of(self.folder):
            with suppress(psutil.Error):
                name = process.name()
                if (
                    (name == "slurmd" and node in process.cmdline())
                    or (name.startswith("slurmstepd") and any(m in f.path for m in marks for f in process.open_files()))
                    or process.environ().get("SLURMD_NODENAME") == node
                ):
                    found.append(process)
        return found

    def stop(self) -> None:
        """End jobs and daemons, and whatever they left."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait(60)
        end_everything_of(self.folder)

    def run(self, program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """What ``program`` printed.

        Raises:
            ClusterError: it failed; with what it said.
        """
        command = [shutil.which(program, path=SEARCH) or program, *arguments]
        variables = {**self.environment, **(environment or {})}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False, timeout=300)
        if done.returncode:
            raise ClusterError(f"{program} {' '.join(arguments)}: exit {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def jobs(self, job_id: str = "") -> dict[str, dict[str, str]]:
        """What ``scontrol show job`` knows, by job id (``12``, ``13_0``)."""
        found = {}
        for line in self.run("scontrol", "--oneliner", "--all", "show", "job", *([job_id] if job_id else [])).split(
            "\n"
        ):
            facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if "JobId" in facts:
                array = f"{facts.get('ArrayJobId')}_{facts.get('ArrayTaskId')}"
                found[array if "ArrayJobId" in facts else facts["JobId"]] = facts
        return found

    def state(self, job_id: str) -> str:
        """Slurm's state of one job or array task, for example ``PENDING``; empty before an array task has split off."""
        return self.jobs().get(job_id, {}).get("JobState", "")

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 1200.0) -> None:
        """Wait until ``condition`` holds; a command that fails meanwhile counts as not yet.

        Raises:
            ClusterError: it did not within ``seconds``; with the queue and the ends of the logs.
        """
        end = time.monotonic() + seconds
        trouble = ""
        while time.monotonic() < end:
            try:
                if condition():
                    return
            except ClusterError as error:
                trouble = str(error)
            time.sleep(0.1)
        raise ClusterError(f"waited {seconds:.0f} s for {what}. {trouble}\n{self.describe()}")

    def describe(self) -> str:
        """The queue and the last lines of every log."""
        try:
            shown = [self.run("squeue", "--all", "--states=all"), self.run("sinfo", "-N", "-l")]
        except ClusterError as error:
            shown = [str(error)]
        for log in sorted((self.folder / "log").glob("*.log")):
            shown.append("\n".join([f"== {log.name}", *log.read_text(errors="replace").splitlines()[-15:]]))
        return "\n".join(shown)

    def _write_configuration(self) -> None:
        first = _free_ports(3)
        self.nodes = (f"n{first + 1}", f"n{first + 2}")
        for name in ("log", "state", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)  # munged refuses a socket that others cannot reach
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        groups = self.limits_memory
        self.configuration.write_text(
            CONFIGURATION.format(
                host=platform.node().split(".")[0],
                user=pwd.getpwuid(os.getuid()).pw_name,
                folder=self.folder,
                port=first,
                first=first + 1,
                last=first + 2,
                tracking="cgroup" if groups else "linuxproc",
                task="cgroup" if groups else "none",
                gather="cgroup" if groups else "linux",
                # Without control groups the daemon looks once a second, and kills what holds more than it asked for.
                gather_parameters="" if groups else "JobAcctGatherParams=OverMemoryKill,UsePss",
            )
        )
        (self.folder / "cgroup.conf").write_text(CONTROL_GROUPS)


def _free_ports(count: int) -> int:
    """The first of ``count`` neighbouring ports that nobody listens on."""
    for first in range(20000 + os.getpid() % 5000 * 5, 60000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise ClusterError("no free ports on 127.0.0.1")


def _processes_of(folder: Path) -> list[psutil.Process]:
    """All that carry this cluster's ``SLURM_CONF``, and slurmstepd, which overwrites its environment, by its log."""
    mark = str(folder / "slurm.conf")
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("SLURM_CONF") == mark
            if not ours and process.name().startswith("slurmstepd"):
                ours = any(Path(file.path).is_relative_to(folder) for file in process.open_files())
            if ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def end_everything_of(folder: Path) -> None:
    """End every process of this cluster: its jobs, then its daemons, whose state nobody will want."""
    environment = {**os.environ, "PATH": SEARCH, "SLURM_CONF": str(folder / "slurm.conf")}
    command = ["timeout", "5", "scancel", "--full", "--signal=KILL", "--state=RUNNING"]
    subprocess.run(command, env=environment, capture_output=True, check=False)
    end = time.monotonic() + 10
    while (processes := _processes_of(folder)) and time.monotonic() < end:  # again: some are only being started
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.1)
    for controller in ("memory", "freezer", "cpuset", "cpuacct", "devices"):
        for spool in folder.glob("spool.*"):
            top = Path("/sys/fs/cgroup") / controller / f"slurm_{spool.suffix[1:]}"
            for group in sorted((path for path in [top, *top.glob("**/")] if path.is_dir()), reverse=True):
                with suppress(OSError):  # something is in it that could not be ended
                    group.rmdir()


if __name__ == "__main__" and sys.argv[1:2] == ["--guard"]:
    for caught in (signal.SIGINT, signal.SIGTERM):
        signal.signal(caught, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_everything_of(Path(sys.argv[2]))
