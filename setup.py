"Install g2c_rl from settings.ini. (nbdev's own template needs `pkg_resources`, which setuptools no longer has.)"
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

root = Path(__file__).parent
cfg = ConfigParser(delimiters=['='])
cfg.read(root/'settings.ini', encoding='utf-8')
cfg = cfg['DEFAULT']
lib = cfg['lib_name']
trackers = cfg['trackers'].split()
extras = {name: cfg[f'{name}_requirements'].split() for name in ('hf', 'smollm2', 'verifiers')}
docs = [*cfg['dev_requirements'].split(), *sum(extras.values(), [])]          # what notebooks import, but no tracker: they are large
work = dict(docs=docs, dev=docs + trackers, bench=docs + cfg['bench_requirements'].split())

setup(
    name=lib.replace('_', '-'), version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'],
    author=cfg['author'], author_email=cfg['author_email'], license='Apache-2.0', license_files=['LICENSE'],
    long_description=(root/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    packages=find_packages(include=[lib, f'{lib}.*']), package_data={lib: ['assets/**']}, include_package_data=False,
    python_requires='>='+cfg['min_python'],
    install_requires=cfg['requirements'].split(),
    extras_require=extras | {name: [name] for name in trackers} | work,
    entry_points={'console_scripts': cfg['console_scripts'].split(), 'nbdev': [f'{lib}={lib}._modidx:d']},
    zip_safe=False,
)
