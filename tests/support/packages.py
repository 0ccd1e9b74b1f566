"""Virtual environments that borrow this one's packages."""

from importlib import metadata
from pathlib import Path


def share(site, *names):
    """Makes packages of this environment visible in the folder `site`: what their wheels brought, as links."""
    for name in names:
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files if ".." not in file.parts}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(distribution.locate_file(top)).absolute())
