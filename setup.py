"""Packaging. Horovod is not listed: no release of it builds against today's frameworks, see build_horovod."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """The version that the package states, read without importing it."""
    for line in (ROOT / "hvd_averaging" / "__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise RuntimeError("hvd_averaging/__init__.py has no __version__ line")


setup(
    name="hvd_averaging",
    version=version(),
    description="Model averaging (local SGD and its descendants) for Horovod",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["hvd_averaging", "hvd_averaging.*"]),
    package_data={"hvd_averaging": ["py.typed"]},
    python_requires=">=3.10, <3.14",  # as far as scripts/check-pythons was run
    extras_require={
        "torch": ["torch>=2.1", "numpy"],
        "tensorflow": ["tensorflow>=2.16", "numpy"],
        "cli": ["click>=8.1", "rich>=13"],
        "demo": ["scikit-learn", "matplotlib", "rich"],
        "docs": ["furo", "myst-parser", "sphinx"],
        "dev": ["build", "click>=8.1", "mypy", "psutil", "pytest", "rich>=13", "ruff", "twine"],
    },
    entry_points={"console_scripts": ["hvd-averaging = hvd_averaging.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
