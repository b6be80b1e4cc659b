"""The recipes of CONTRIBUTING.md, each of which is carried out in a copy of the tree. A new op, policy, facade,
method or preset of codes touches one folder (its room) and one table, builds and passes its test. The long builds run
only in scripts/soak."""

import os
import pathlib
import shutil
import subprocess
import tomllib

import pytest

from kvasir_process import BINARY, ROOT

RECIPES = ROOT / "tests" / "recipes"
BUILT = {"codes", "policy"} if not os.environ.get("KVASIR_SOAK") else {path.name for path in RECIPES.iterdir()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of all files that git knows. Each recipe is carried out in it and then undone."""
    copy = tmp_path_factory.mktemp("recipes") / "tree"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if not (ROOT / name).is_file() or name.startswith("tests/"):
            continue
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return copy


def carry_out(recipe, folder, tree):
    """Adds the recipe's files and makes its edits. Returns the added and the edited paths."""
    added, edited = set(), {}
    for toy in folder.rglob("*.toy"):
        name = toy.relative_to(folder).with_suffix("")
        assert not (tree / name).exists(), name
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(toy, tree / name)
        added.add(name)
    for edit in recipe["edit"]:
        path = tree / edit["file"]
        text = path.read_text()
        edited.setdefault(pathlib.Path(edit["file"]), text)
        assert text.count(edit["find"]) == 1, f"{edit['file']} has '{edit['find']}' {text.count(edit['find'])} times"
        path.write_text(text.replace(edit["find"], edit["replace"]))
    return added, edited


def take_back(tree, added, edited):
    for name in added:
        (tree / name).unlink()
    for name, text in edited.items():
        (tree / name).write_text(text)


def object_of(source, build):
    """Returns the object file of the unity source that includes a source file."""
    for unity in (build / source).parent.rglob("Unity/*.cxx"):
        if source in unity.read_text():
            return f"{unity.relative_to(build)}.o"
    raise AssertionError(f"no unity source includes {source}")


@pytest.mark.parametrize("kind", sorted(path.name for path in RECIPES.iterdir()))
def test_a_new_component_changes_one_folder_and_one_table_and_works(kind, tree):
    folder = RECIPES / kind
    recipe = tomllib.loads((folder / "recipe.toml").read_text())
    added, edited = carry_out(recipe, folder, tree)
    try:
        room = pathlib.Path(recipe["room"])
        table = pathlib.Path(recipe.get("table", recipe["room"]))
        for name in added:
            assert room in name.parents, f"{name} is outside of {room}"
        # Besides the table, the list of source files for CMake may change, in the folder of the room or of the table.
        lists = {room / "CMakeLists.txt", table.parent / "CMakeLists.txt"}
        for name in edited:
            assert room in name.parents or name == table or name in lists, f"{name} is touched, too"
        if kind not in BUILT:
            return
        if kind == "method" and not BINARY.with_name("kvasir-compress").exists():
            pytest.skip("this build has no kvasir-compress, because there is no libtorch")
        build = tree.parent / "build"
        environment = os.environ | {"CCACHE_BASEDIR": str(tree), "CCACHE_NOHASHDIR": "1"}

        def run(*command):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

        run("cmake", "-S", tree, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
            "-DKVASIR_CHECKS=ON", "-DKVASIR_CUDA=OFF", "-DKVASIR_EMULATION=OFF", f"-DKVASIR_ONLY={recipe['folders']}")
        objects = [object_of(recipe["compile"], build)] if "compile" in recipe else []
        run("cmake", "--build", build, "--target", recipe["target"], *objects)
        run("ctest", "--test-dir", build, "--no-tests=error", "-R", f"^{recipe['target']}$")
    finally:
        take_back(tree, added, edited)
