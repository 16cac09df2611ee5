"""The parts of the build that setup.cfg cannot describe: the compiled part, and the README of the package index.

Links to files of the repository do not work on a package index, so its README contains their paths instead.
"""

import hashlib
import os
import re
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

RELATIVE_LINK = re.compile(r"\[([^]]+)\]\((?!https?://)([^)]+)\)")


def name_link(link: re.Match[str]) -> str:
    text, path = link.groups()
    return text if text == path else f"{text} ({path})"


readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
# One build serves Python 3.11 and all later versions. Each free-threaded Python needs a build of its own.
is_stable = not sysconfig.get_config_var("Py_GIL_DISABLED")
SOURCE = "pyrocket_consumer/protocol/_accelerator.c"
text = (Path(__file__).parent / SOURCE).read_bytes().replace(b"\r\n", b"\n")  # the same for every checkout
digest = hashlib.sha256(text).hexdigest()[:16]  # see protocol/accelerator.py
accelerator = Extension(
    "pyrocket_consumer.protocol._accelerator",
    [SOURCE],
    extra_compile_args=[] if os.name == "nt" else ["-O3", "-g0"],
    define_macros=[("SOURCE", f'"{digest}"'), *([("Py_LIMITED_API", "0x030b0000")] if is_stable else [])],
    py_limited_api=is_stable,
    optional=True,  # without a compiler the Python code is used
)
setup(
    long_description=RELATIVE_LINK.sub(name_link, readme),
    ext_modules=[] if os.environ.get("PYROCKET_PURE", "0") not in ("", "0") else [accelerator],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if is_stable else {},
)
