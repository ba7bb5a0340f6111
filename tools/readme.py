"""Write README.md from nbs/index.ipynb, without Quarto: the front page of the book is the front page of the repository.

Saved outputs stay; a figure that a cell drew is written to nbs/images/, since a README cannot hold it.
"""
import json, posixpath, re
from base64 import b64decode

from build_site import cell_options, number_labels, read_bib, resolve
from fastcore.script import call_parse
from nbdev.config import get_config


def callout(m):
    "A Quarto callout as GitHub shows one"
    kind = {'warning': 'WARNING', 'important': 'IMPORTANT', 'caution': 'CAUTION', 'tip': 'TIP'}.get(m[1], 'NOTE')
    body = re.sub(r'^#+ (.*)', r'**\1**\n', m[2].strip())
    return f'> [!{kind}]\n' + '\n'.join(f'> {l}'.rstrip() for l in body.splitlines())

def link(target):
    "A path as seen from the repository's root"
    return target if re.match(r'[a-z]+:|#', target) else posixpath.normpath(posixpath.join('nbs', target))

def github_markdown(s):
    "Quarto's markdown as GitHub's"
    s = re.sub(r'^::: ?\{\.callout-(\w+)[^}]*\}\n(.*?)\n:::$', callout, s, flags=re.S | re.M)
    s = re.sub(r'^:{3,}.*\n?', '', s, flags=re.M)                                  # other divs
    s = re.sub(r'(?<=\))\{[^}\n]*\}|(?<=\S) \{[#.][^}\n]*\}$', '', s, flags=re.M)    # attributes
    s = re.sub(r'^: (.*)$', r'*\1*', s, flags=re.M)                                 # captions of tables
    s = re.sub(r'\[([^\]]*)\]\(#(?:fig|tbl|eq|sec)-[^)]*\)', r'\1', s)               # a README has no such anchors
    s = re.sub(r'(?<=\]\()[^)\s]+', lambda m: link(m[0]), s)
    s = re.sub(r'(?<=src=")[^"]+', lambda m: link(m[0]), s)
    return re.sub(r'\n{3,}', '\n\n', s).strip()

def outputs(cell, opts, images):
    "The saved outputs of `cell`; pictures go to the folder `images`"
    for i,out in enumerate(cell['outputs']):
        data = out.get('data', {})
        if out.get('name') == 'stderr': continue
        if 'text/markdown' in data: yield github_markdown(''.join(data['text/markdown']))
        elif 'image/png' in data:
            images.mkdir(exist_ok=True)
            name = f"readme-{opts.get('label', cell['id'])}{f'-{i}' if i else ''}.png"
            (images/name).write_bytes(b64decode(data['image/png']))
            yield f"![{opts.get('fig-alt', '')}](nbs/images/{name})"
            if 'fig-cap' in opts: yield f"*{opts['fig-cap']}*"
        elif text := ''.join(out.get('text') or data.get('text/plain', [])).rstrip(): yield f'```\n{text}\n```'

def readme(nbs):
    "The text of README.md"
    nb, bib, parts = json.loads((nbs/'index.ipynb').read_text(encoding='utf-8')), read_bib(nbs/'references.bib'), []
    for c in nb['cells']: c['source'] = ''.join(c['source'])
    flags = {c['id']: set(re.findall(r'^#\| *(\w+)', c['source'], re.M)) for c in nb['cells']}
    nb['cells'][0]['source'] = re.sub(r'^- [\w-]+: .*\n?', '', nb['cells'][0]['source'], flags=re.M)    # front matter lines
    def missing(what): raise ValueError(f'index.ipynb: {what} is not defined')
    resolve(nb, number_labels(nb), bib, missing)
    for c in nb['cells']:
        if c['id'] == 'references': continue
        if c['cell_type'] == 'markdown':
            parts.append(re.sub(r'\(#ref-([\w:-]+)\)', lambda m: f"({bib[m[1]]['url']})", github_markdown(c['source'])))
        elif c['cell_type'] == 'code' and not flags[c['id']] & {'hide', 'default_exp', 'export'}:
            opts, code = cell_options(c['source'])
            if opts.get('include') is False: continue
            if opts.get('echo') is not False and not opts.get('code-fold') and code.strip(): parts.append(f'```python\n{code.strip()}\n```')
            if opts.get('output') is not False: parts += outputs(c, opts, nbs/'images')
    return '\n\n'.join(p for p in parts if p) + '\n'

@call_parse
def main():
    "Write README.md from nbs/index.ipynb"
    cfg = get_config()
    (cfg.config_path/'README.md').write_text(readme(cfg.nbs_path), encoding='utf-8')
