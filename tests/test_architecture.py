"""The order of the book is the order of the imports, and every public name explains itself.

Chapters are numbered; a module may import only from smaller numbers. The algorithm and `baselm` (a policy to train) do not know
each other, and nothing imports the command line.
"""
import ast
import json
import re

import pytest
from conftest import ROOT, notebooks

LIB = ROOT/'g2c_rl'
CHAPTERS = [p for p in notebooks() if re.match(r'\d+_', p.name) and p.parts[0] in ('baselm', p.name)]   # those that export
NAME = {p: '.'.join((*p.parts[:-1], re.sub(r'^\d+_', '', p.stem))) for p in CHAPTERS}
NUMBER = {NAME[p]: int(p.name.split('_')[0]) for p in CHAPTERS}
chapters = pytest.mark.parametrize('nb', CHAPTERS, ids=NAME.get)

def code_cells(nb):
    nb = json.loads((ROOT/'nbs'/nb).read_text(encoding='utf-8'))
    return [''.join(c['source']) for c in nb['cells'] if c['cell_type'] == 'code']

def module(nb): return ast.parse((LIB/(NAME[nb].replace('.', '/') + '.py')).read_text(encoding='utf-8'))

def internal_imports(nb):
    "The modules of the package that a chapter's module imports, `baselm.model` for `g2c_rl.baselm.model`"
    here = ['g2c_rl', *NAME[nb].split('.')]
    for node in ast.walk(module(nb)):
        if isinstance(node, ast.Import): names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = '.'.join(here[:-node.level] if node.level else []) + ('.' if node.level and node.module else '') + (node.module or '')
            names = [base, *(f'{base}.{a.name}' for a in node.names)]
        else: continue
        yield from {n.removeprefix('g2c_rl.') for n in names if n.removeprefix('g2c_rl.') in NUMBER}

def python(source): return ast.parse(re.sub(r'^\s*[%!].*$', '', source, flags=re.M))        # without magics

def star_imports(source):
    return [n.module for n in ast.walk(python(source)) if isinstance(n, ast.ImportFrom) and n.names[0].name == '*']

def test_there_are_chapters(): assert {'tasks', 'loss', 'baselm.model', 'cli'} <= NUMBER.keys()

@chapters
def test_notebook_module_and_page_share_a_name(nb):
    exported = re.findall(r'^#\| *default_exp +(\S+)', '\n'.join(code_cells(nb)), re.M)
    assert exported == [NAME[nb]]

@chapters
def test_imports_go_down(nb):
    for other in internal_imports(nb):
        assert other != 'cli', 'nothing imports the command line'
        if other.split('.')[0] == NAME[nb].split('.')[0] == 'baselm' or 'baselm' not in f'{other} {NAME[nb]}':
            assert NUMBER[other] < NUMBER[NAME[nb]], f'{NAME[nb]} imports {other}, which comes later'

@chapters
def test_algorithm_and_baselm_are_strangers(nb):
    baselm, algorithm = NAME[nb].startswith('baselm.'), NUMBER[NAME[nb]] < 10 and not NAME[nb].startswith('baselm.')
    for other in internal_imports(nb):
        assert not (algorithm and other.startswith('baselm.')), f'{NAME[nb]} knows a particular policy'
        assert not (baselm and not other.startswith('baselm.')), f'{NAME[nb]} knows the algorithm'

@pytest.mark.parametrize('nb', notebooks(), ids=str)
def test_no_star_imports(nb):
    for source in code_cells(nb): assert not star_imports(source)

@pytest.mark.parametrize('nb', notebooks(), ids=str)
def test_imports_stand_alone(nb):
    "An unexported cell with an import runs again whenever the documentation is built, so it holds nothing else"
    for source in code_cells(nb):
        if re.search(r'^#\| *(exports?|eval: *false)\b', source, re.M) or re.match(r'%%', source): continue
        kinds = {isinstance(n, (ast.Import, ast.ImportFrom)) for n in python(source).body}
        assert kinds != {True, False}, f'imports in a cell of their own, please:\n{source}'

def public_functions(tree):
    "Public functions and methods of a module, by name; a `@patch`ed function is a method"
    for node in ast.walk(tree):
        body = getattr(node, 'body', None)
        if isinstance(node, ast.ClassDef) and node.name.startswith('_') or not isinstance(node, (ast.Module, ast.ClassDef)): continue
        yield from (f for f in body if isinstance(f, ast.FunctionDef) and not f.name.startswith('_'))

@chapters
def test_public_functions_are_documented(nb):
    code = (LIB/(NAME[nb].replace('.', '/') + '.py')).read_text(encoding='utf-8')
    lines, tree = code.splitlines(), ast.parse(code)
    for cls in (c for c in tree.body if isinstance(c, ast.ClassDef) and not c.name.startswith('_')):
        assert ast.get_docstring(cls), f'{cls.name} has no docstring'
    for f in public_functions(tree):
        decorators = {getattr(d, 'id', '') for d in f.decorator_list}
        if 'property' in decorators or f.name == 'forward': continue        # described by their class
        assert ast.get_docstring(f), f'{f.name} has no docstring'
        assert '\n' not in ast.get_docstring(f), f'{f.name}: a docstring is one line; the rest is prose'
        args = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs, *filter(None, (f.args.vararg, f.args.kwarg))]
        args = [a for a in args[bool(decorators & {'patch'}):] if a.arg not in ('self', 'cls')]
        assert len({a.lineno for a in args}) == len(args), f'{f.name}: a parameter has a line of its own'
        for a in args: assert '#' in lines[a.lineno - 1], f'{f.name}: {a.arg} has no comment'
