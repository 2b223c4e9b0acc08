"""Copy the folders that a checkout has next to the library into the wheel; pyproject.toml says everything else."""

import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("notebooks", "params", "slurm")


class BuildWithFolders(build_py):
    """Build the package, with ``FOLDERS`` below ``fvc_lib/installed``, where ``fvc_lib.services.home`` looks."""

    def run(self) -> None:
        """Copy the folders into the build; an editable installation reads them from the checkout."""
        super().run()
        if not self.editable_mode:
            for name in FOLDERS:
                target = f"{self.build_lib}/fvc_lib/installed/{name}"
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(name, target, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.partial*"))


setup(cmdclass={"build_py": BuildWithFolders})
