class Certificate:
    pass


def verify():
    pass
