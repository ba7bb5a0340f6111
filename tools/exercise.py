"""Write what a learner's folder is made of: a copy of the tests, and the exercises page as a notebook to work in.

The working notebook has the page's text and code, an empty cell for each answer, and neither model answers nor outputs.
"""
import json, re, shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE, TESTS, ASSETS = ROOT/'nbs'/'exercises'/'70_exercises.ipynb', ROOT/'tests'/'test_rl.py', ROOT/'g2c_rl'/'assets'/'learn'


def working_cells(cells):
    "The cells of the page as a learner gets them"
    for c in cells:
        source, cell = ''.join(c['source']), dict(id=c['id'], cell_type=c['cell_type'], metadata={})
        if c['cell_type'] == 'code':
            if re.search(r'^#\| *hide\b', source, re.M): continue
            source = re.sub(r'^#\|.*\n', '', source, flags=re.M)
            yield cell | dict(source=source.splitlines(True), execution_count=None, outputs=[])
        elif not source.startswith('::: {.callout-note collapse="true"}'):
            source = re.sub(r'\[([^\]]+)\]\([^)]*\.(?:html|ipynb)[^)]*\)', r'\1', source)       # the site's pages are not beside it
            yield cell | dict(source=source.splitlines(True))
            if asks := re.search(r'^\*\*(Question|Predict)\b', source, re.M):
                reply = dict(Question='**Your answer**', Predict='**Your prediction**')[asks[1]]
                yield dict(id=c['id'] + 'a', cell_type='markdown', metadata={}, source=[reply + '\n', '\n'])


def main():
    page = json.loads(PAGE.read_text(encoding='utf-8'))
    ASSETS.mkdir(parents=True, exist_ok=True)
    text = json.dumps(page | dict(cells=list(working_cells(page['cells']))), indent=1, ensure_ascii=False, sort_keys=True)
    (ASSETS/'experiments.ipynb').write_text(text + '\n', encoding='utf-8')
    shutil.copyfile(TESTS, ASSETS/'test_rl.py.txt')     # not .py: to nbdev, a folder with one is a package of its own


if __name__ == '__main__': main()
