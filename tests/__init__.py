"""The tests, a package so that every test module has one name in the pytest process and in the ranks of a world."""
