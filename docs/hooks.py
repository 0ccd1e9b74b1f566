"""What mkdocs does beyond its plugins: pages and pictures from outside docs/, and a site that loads nothing from elsewhere.

Links are written as they hold in the repository (../bench/results/x.svg) and point into the site afterwards.
"""

import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # path in the repository -> in the site
ELSEWHERE |= {
    f"bench/results/{p.name}": f"results/{p.name}"
    for p in (ROOT / "bench" / "results").iterdir()
    if p.suffix in (".md", ".svg")
}
IN_REPOSITORY = {site: path for path, site in ELSEWHERE.items()}


def in_site(path):
    """Where a file of the repository stands in the site, None where it does not."""
    return ELSEWHERE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)


def on_files(files, config):
    for path, site in ELSEWHERE.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri.startswith("results/"):
        page.meta["hide"] = ["toc"]  # room for wide tables
    here = IN_REPOSITORY.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(found):
        target, hash, anchor = found[2].partition("#")
        if not target or ":" in target:
            return found[0]
        site = in_site(posixpath.normpath(posixpath.join(posixpath.dirname(here), target)))
        if site is None:
            return found[0]
        return f"{found[1]}{posixpath.relpath(site, posixpath.dirname(page.file.src_uri) or '.')}{hash}{anchor})"

    return re.sub(r"(\]\()([^)\s]+)\)", moved, markdown)


class Loads(HTMLParser):
    """What a page makes a browser load, as against what it links to."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        loads = tag in ("script", "img", "iframe", "source") or (tag == "link" and attrs.get("rel") != "canonical")
        self.found += [attrs[k] for k in ("src", "href", "srcset") if loads and attrs.get(k)]


def on_post_build(config):
    for path in Path(config.site_dir).rglob("*.html"):
        page = Loads()
        page.feed(path.read_text())
        if outside := [url for url in page.found if re.match(r"(https?:)?//", url)]:
            raise PluginError(f"{path} loads {outside[0]} from elsewhere; the site must work without network")
