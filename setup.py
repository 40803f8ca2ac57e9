"""The packages of the wheel: recipes/ becomes elastictrain.recipes, as no other package may be called `recipes`."""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["elastictrain*"]) + [f"elastictrain.{one}" for one in find_packages(include=["recipes*"])],
    package_dir={"elastictrain.recipes": "recipes"},
)
