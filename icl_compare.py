def main(flags): pass
