"""What a module imports, names or calls that could run, unpickle or fetch something; tests/unit/test_security.py.

    findings(source) -> every such place, by a key that an allowance can name

Keys: a module's root ("subprocess"), a builtin's name ("eval"), and for an attribute or an imported name its whole path
where an import says it ("os.system", "torch.load"), else the attribute alone (".load"). An alias is followed to what it
stands for, and an attribute counts whether it is called or only taken.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

# Unpickling, other processes, the network, foreign libraries, files outside a given folder, code from text.
MODULES = {
    "pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "subprocess", "pty", "multiprocessing",
    "socket", "socketserver", "ssl", "urllib", "urllib3", "http", "requests", "httpx", "aiohttp", "ftplib", "smtplib",
    "telnetlib", "xmlrpc", "ctypes", "cffi", "shutil", "tempfile", "runpy", "code", "codeop", "builtins",
    "asyncio", "zmq", "pandas", "huggingface_hub", "sqlite3", "webbrowser", "pdb", "imp", "zipimport",
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile", "__import__", "__builtins__", "open", "input"}
ATTRIBUTES = {
    "system", "popen", "fork", "forkpty", "startfile", "posix_spawn", "posix_spawnp", "execl", "execle", "execlp",
    "execlpe", "execv", "execve", "execvp", "execvpe", "spawnl", "spawnle", "spawnlp", "spawnlpe", "spawnv", "spawnve",
    "spawnvp", "spawnvpe", "open", "load", "loads", "from_file", "load_state_dict", "load_inline", "load_library",
    "unsafe_load", "import_module", "exec_module", "Unpickler", "eval", "exec", "__import__", "__builtins__",
    "ProcessPoolExecutor", "load_module", "SourceFileLoader", "SourcelessFileLoader", "ExtensionFileLoader",
    "attrgetter", "methodcaller",
    "read_pickle", "to_pickle", "recv_pyobj", "recv_object_list", "broadcast_object_list", "all_gather_object",
    "gather_object", "scatter_object_list", "unlink", "remove", "rmdir", "rmtree", "rename", "symlink_to", "chmod",
}  # fmt: skip
# An argument that runs a checkpoint's own code.
ARGUMENTS = {"trust_remote_code"}
# What no allowance lifts: pickles of whatever classes the file names.
TORCH_LOADS = ("torch.load", "torch.serialization.load")
UNSAFE_LOAD = "torch.load without weights_only=True"
# tl.load reads memory of a kernel's own arguments.
HARMLESS = ("triton.language.",)


class Finding(NamedTuple):
    key: str
    line: int


def findings(source: str) -> list[Finding]:
    tree = ast.parse(source)
    scan = _Scan(_bindings(tree))
    scan.visit(tree)
    return scan.found


def _bindings(tree: ast.AST) -> dict[str, str]:
    """What each imported name of a file stands for, wherever it is imported."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module or ''}.{alias.name}" for alias in node.names}
    return names


class _Scan(ast.NodeVisitor):
    def __init__(self, bindings: dict[str, str]):
        self.found: list[Finding] = []
        self._bindings = bindings
        self._parameters: list[set[str]] = []
        self._safe_loads: set[ast.AST] = set()

    def _note(self, key: str, node: ast.AST) -> None:
        self.found.append(Finding(key, node.lineno))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if (root := alias.name.split(".")[0]) in MODULES:
                self._note(root, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if not node.level and (root := module.split(".")[0]) in MODULES:
            self._note(root, node)
            return
        for alias in node.names:
            path = f"{module}.{alias.name}"
            if alias.name in MODULES:
                self._note(alias.name, node)
            elif alias.name in ATTRIBUTES | {"*"} and not path.startswith(HARMLESS):
                self._note(path, node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        # Defaults and decorators are outside the parameters' reach.
        for outer in (*given.defaults, *filter(None, given.kw_defaults), *getattr(node, "decorator_list", ())):
            self.visit(outer)
        self._parameters.append({argument.arg for argument in every if argument})
        for inner in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(inner)
        self._parameters.pop()

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            if keyword.arg in ARGUMENTS:
                self._note(keyword.arg, node)
        value = {keyword.arg: keyword.value for keyword in node.keywords}.get("weights_only")
        if isinstance(value, ast.Constant) and value.value is True:
            self._safe_loads.add(node.func)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
            name = getattr(node.args[1], "value", None)
            if isinstance(name, str) and name in ATTRIBUTES | MODULES:
                self._note(f".{name}", node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if not (path or "").startswith(HARMLESS):
            if node.attr in ATTRIBUTES:
                self._note(path or f".{node.attr}", node)
            # A module reached through another that has imported it.
            if path and node.attr in MODULES:
                self._note(node.attr, node)
            self._judge_load(path, node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        # sys.modules["subprocess"]
        name = getattr(node.slice, "value", None)
        if self._path(node.value) == "sys.modules" and isinstance(name, str):
            self._note(name.split(".")[0], node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            return
        if node.id in self._bindings:
            self._judge_load(self._bindings[node.id], node)
        elif node.id in BUILTINS and not any(node.id in names for names in self._parameters):
            self._note(node.id, node)

    def _judge_load(self, path: str | None, node: ast.AST) -> None:
        if path in TORCH_LOADS and node not in self._safe_loads:
            self._note(UNSAFE_LOAD, node)

    def _path(self, node: ast.AST) -> str | None:
        """The dotted path of an imported name or of attributes of one; None for all else."""
        if isinstance(node, ast.Name):
            return self._bindings.get(node.id)
        if isinstance(node, ast.Attribute):
            inner = self._path(node.value)
            return None if inner is None else f"{inner}.{node.attr}"
        return None
